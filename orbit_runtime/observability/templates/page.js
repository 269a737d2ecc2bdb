'use strict';
var SVG = 'http://www.w3.org/2000/svg';
function text(value) {
  if (value === null || value === undefined) return '–';
  if (value !== 0 && Math.abs(value) < 1e-3) return value.toExponential(2);
  return String(Math.abs(value) >= 1e5 ? Math.round(value) : +value.toPrecision(4));
}
function element(name, className, content) {
  var made = document.createElement(name);
  if (className) made.className = className;
  if (content !== undefined) made.textContent = content;
  return made;
}
// What a click on a step opens; set by the table of rollouts where the page has one.
var openStep = null;

function alive(svg) {
  var data = JSON.parse(svg.dataset.points), d = svg.dataset, figure = svg.parentNode;
  var left = +d.left, right = +d.right, n = data.x.length, span = data.x[n - 1] - data.x[0];
  var rule = document.createElementNS(SVG, 'line'), tip = element('div', 'tip'), at = -1;
  rule.setAttribute('class', 'rule'); rule.setAttribute('y1', d.top); rule.setAttribute('y2', d.bottom);
  rule.style.display = 'none'; svg.appendChild(rule);
  tip.hidden = true; figure.appendChild(tip);
  function place(index) { return span ? left + (data.x[index] - data.x[0]) / span * (right - left) : (left + right) / 2; }
  function height(value) {
    var low = +d.low, high = +d.high;
    if (d.log === '1') value = Math.log10(Math.max(value, Math.pow(10, low)));
    var share = Math.min(1, Math.max(0, (value - low) / (high - low)));
    return +d.top + (d.bottom - d.top) * (1 - share);
  }
  function show(index) {
    at = index;
    rule.setAttribute('x1', place(index)); rule.setAttribute('x2', place(index)); rule.style.display = '';
    var from = data.from ? data.from[index] : data.x[index];
    tip.textContent = '';
    tip.appendChild(element('b', '', (from === data.x[index] ? 'step ' : 'mean of steps ' + from + ' to ') + data.x[index]));
    data.s.forEach(function (s) {
      if (s[1][index] === null) return;
      var line = element('span'), key = element('i', 'c' + s[2]), band = s[3];
      line.appendChild(key);
      line.appendChild(document.createTextNode(s[0] + ' '));
      line.appendChild(element('b', '', text(s[1][index])));
      if (band && band[0][index] !== null)
        line.appendChild(document.createTextNode(' (' + text(band[0][index]) + ' to ' + text(band[1][index]) + ')'));
      tip.appendChild(line);
    });
    if (openStep) tip.appendChild(element('span', 'hint', 'click: its rollouts'));
    tip.hidden = false;
    var box = svg.getBoundingClientRect(), x = svg.offsetLeft || 12, middle = place(index) / svg.viewBox.baseVal.width;
    x = middle * box.width + 12;
    tip.style.left = Math.max(0, middle < .5 ? x + 14 : x - tip.offsetWidth - 14) + 'px';
  }
  function hide() { rule.style.display = 'none'; tip.hidden = true; at = -1; }
  function nearest(event) {
    var box = svg.getBoundingClientRect();
    var x = (event.clientX - box.left) / box.width * svg.viewBox.baseVal.width;
    var wanted = data.x[0] + (x - left) / (right - left) * span, best = 0;
    for (var i = 1; i < n; i++) if (Math.abs(data.x[i] - wanted) < Math.abs(data.x[best] - wanted)) best = i;
    return best;
  }
  svg.addEventListener('pointermove', function (event) { show(nearest(event)); });
  svg.addEventListener('pointerdown', function (event) { show(nearest(event)); });
  svg.addEventListener('pointerleave', hide);
  svg.addEventListener('blur', hide);
  svg.addEventListener('click', function (event) { if (openStep) openStep(data.x[nearest(event)]); });
  svg.addEventListener('keydown', function (event) {
    var by = {ArrowLeft: -1, ArrowRight: 1}[event.key];
    if (by) { show(Math.min(n - 1, Math.max(0, at < 0 ? (by > 0 ? 0 : n - 1) : at + by))); event.preventDefault(); }
    if (event.key === 'Enter' && at >= 0 && openStep) openStep(data.x[at]);
    if (event.key === 'Escape') hide();
  });
  // The exponential moving average of TensorBoard and Weights & Biases, without the bias of its first values.
  function smooth(weight) {
    svg.querySelectorAll('.ghost').forEach(function (old) { old.remove(); });
    svg.querySelectorAll('path[data-line]').forEach(function (path) {
      var s = data.s[+path.dataset.line], mean = 0, mass = 0, drawn = '', pen = 'M';
      if (path.dataset.raw === undefined) path.dataset.raw = path.getAttribute('d');
      if (s[2] === 9 || !weight) { path.setAttribute('d', path.dataset.raw); return; }
      var ghost = path.cloneNode();
      ghost.removeAttribute('data-line'); ghost.setAttribute('d', path.dataset.raw); ghost.classList.add('ghost');
      path.parentNode.insertBefore(ghost, path);
      s[1].forEach(function (value, index) {
        if (value === null) { pen = 'M'; return; }
        mean = weight * mean + (1 - weight) * value; mass = weight * mass + (1 - weight);
        drawn += pen + place(index).toFixed(1) + ' ' + height(mean / mass).toFixed(1);
        pen = 'L';
      });
      path.setAttribute('d', drawn);
    });
  }
  return {steps: n, smooth: d.low === undefined ? function () {} : smooth};
}

var smoothing = null;
function begin() {
  var charts = Array.prototype.map.call(document.querySelectorAll('svg[data-points]'), alive);
  document.querySelectorAll('.smoothing').forEach(function (control) {
    var slider = control.querySelector('input'), out = control.querySelector('output');
    function apply() {
      smoothing = slider.value;
      out.textContent = slider.value === '0' ? 'off' : slider.value;
      charts.forEach(function (chart) { chart.smooth(chart.steps > 12 ? +slider.value : 0); });
    }
    control.hidden = false;
    if (smoothing !== null) slider.value = smoothing;
    slider.addEventListener('input', apply);
    apply();
  });
}
if (window.matchMedia('(min-width: 800px)').matches)
  document.querySelectorAll('details.wide').forEach(function (each) { each.open = true; });
begin();

// Of a run that goes on: parts of the page are exchanged for their newest state; what is open stays open.
(function () {
  var note = document.getElementById('live');
  if (!note) return;
  var EVERY = 10000, step = note.dataset.step, status = note.dataset.status, words = 'live', busy = false;
  function say(said) {
    words = said || words;
    document.getElementById('live').textContent = words;
  }
  function exchange(page) {
    if (!document.getElementById('rollouts') && page.getElementById('rollouts')) { location.reload(); return; }
    var fresh = page.querySelectorAll('.fresh');
    document.querySelectorAll('.fresh').forEach(function (old, at) {
      if (!fresh[at]) return;
      var now = document.importNode(fresh[at], true), open = old.querySelectorAll('details');
      now.querySelectorAll('details').forEach(function (each, index) { if (open[index]) each.open = open[index].open; });
      old.replaceWith(now);
    });
    begin();
    document.dispatchEvent(new CustomEvent('fresh', {detail: page}));
  }
  function look() {
    if (document.hidden || busy) return;
    busy = true;
    fetch('report').then(function (answer) {
      if (!answer.ok) throw new Error(answer.status);
      return answer.text();
    }).then(function (text) {
      var page = new DOMParser().parseFromString(text, 'text/html'), now = page.getElementById('live');
      if (!now) return;
      if (now.dataset.step !== step || now.dataset.status !== status) exchange(page);
      step = now.dataset.step; status = now.dataset.status;
      say('live, ' + new Date().toLocaleTimeString());
    }).catch(function () { say('the run does not answer: this is its last state'); }).then(function () { busy = false; });
  }
  say();
  setInterval(look, EVERY);
  document.addEventListener('visibilitychange', look);
  document.addEventListener('look', look);
})();
