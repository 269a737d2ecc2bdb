function text(value) {
  if (value === null) return '-';
  return value !== 0 && Math.abs(value) < 1e-3 ? value.toExponential(2) : String(value);
}
document.querySelectorAll('svg[data-points]').forEach(function (svg) {
  var data = JSON.parse(svg.dataset.points), d = svg.dataset;
  var left = +d.left, right = +d.right, ns = 'http://www.w3.org/2000/svg';
  var rule = document.createElementNS(ns, 'line');
  rule.setAttribute('class', 'rule'); rule.setAttribute('y1', d.top); rule.setAttribute('y2', d.bottom);
  rule.style.display = 'none'; svg.appendChild(rule);
  var out = svg.parentNode.querySelector('.reading');
  function show(event) {
    var box = svg.getBoundingClientRect(), n = data.x.length;
    var x = (event.clientX - box.left) / box.width * svg.viewBox.baseVal.width;
    var span = data.x[n - 1] - data.x[0];
    var wanted = data.x[0] + (x - left) / (right - left) * span, best = 0;
    for (var i = 1; i < n; i++) if (Math.abs(data.x[i] - wanted) < Math.abs(data.x[best] - wanted)) best = i;
    var at = span ? left + (data.x[best] - data.x[0]) / span * (right - left) : (left + right) / 2;
    rule.setAttribute('x1', at); rule.setAttribute('x2', at); rule.style.display = '';
    out.textContent = 'step ' + data.x[best] + ': ' + data.s.map(function (s) {
      return s[0] + ' ' + text(s[1][best]);
    }).join(', ');
  }
  svg.addEventListener('pointermove', show);
  svg.addEventListener('pointerdown', show);
  svg.addEventListener('pointerleave', function () { rule.style.display = 'none'; out.textContent = '\u00a0'; });
});
