(function () {
  var place = document.getElementById('rollouts'), source = document.getElementById('rollout-data');
  if (!place || !source) return;
  var PER_PAGE = 8, data = JSON.parse(source.textContent), pages = data.pages, step = data.steps[data.steps.length - 1];
  var page = 0, waiting = false, asked = '', which = 'all', order = 'sampled', said = '';
  var KEPT = {
    all: ['every group', function () { return true; }],
    mixed: ['rewards differ', function (g) { return g.low !== g.high; }],
    equal: ['rewards all equal', function (g) { return g.low === g.high; }],
    failed: ['a reward failed', function (g) { return g.rows.some(function (r) { return r[2] === null; }); }],
    cut: ['an answer cut off', function (g) { return g.rows.some(function (r) { return r[6] === 'length'; }); }],
    tokens: ['an answer by its tokens', function (g) { return g.rows.some(function (r) { return r[8]; }); }]
  };
  var ORDERS = {
    sampled: ['as sampled', function () { return 0; }],
    low: ['lowest reward first', function (a, b) { return a.mean - b.mean; }],
    high: ['highest reward first', function (a, b) { return b.mean - a.mean; }],
    apart: ['widest spread first', function (a, b) { return (b.high - b.low) - (a.high - a.low); }]
  };

  function measured(group) {
    var rewards = group.rows.map(function (r) { return r[2]; }).filter(function (r) { return r !== null; });
    group.low = Math.min.apply(null, rewards); group.high = Math.max.apply(null, rewards);
    group.mean = rewards.length ? rewards.reduce(function (a, b) { return a + b; }, 0) / rewards.length : null;
    return group;
  }
  // Of one step, or with something to look for, of every step that the page holds, that one's first.
  function groups() {
    var steps = [step].concat(asked ? data.steps.filter(function (s) { return s !== step && pages[s]; }) : []);
    return steps.reduce(function (all, s) {
      return all.concat((pages[s] || []).map(function (g) { g.step = s; return g.mean === undefined ? measured(g) : g; }));
    }, []);
  }
  function searched() {
    var steps = data.steps.filter(function (s) { return pages[s]; }), parts = steps.filter(function (s) { return data.next[s] !== undefined; });
    var left = data.kept - steps.length, made = element('p', 'label', 'Searched: ' + steps.length + ' of ' + data.kept + ' steps');
    if (parts.length) made.textContent += ', of ' + parts.length + ' of them the first groups';
    made.textContent += left || parts.length ? '. Not searched: what this page does not hold, nor the middle of long texts. All of it: ' : ', but not the middle of long texts. All of it: ';
    made.appendChild(element('code', '', "zstd -dc rollouts/*.jsonl.zst | grep -F '…'"));
    return made;
  }
  function holds(row, group) {
    return [group.prompt, group.expected, group.id, row[1]].some(function (t) { return t.toLowerCase().indexOf(asked) >= 0; });
  }
  function marked(parent, content) {
    var at = asked ? content.toLowerCase().indexOf(asked) : -1;
    if (at < 0) { parent.textContent = content; return parent; }
    parent.appendChild(document.createTextNode(content.slice(0, at)));
    parent.appendChild(element('mark', '', content.slice(at, at + asked.length)));
    parent.appendChild(document.createTextNode(content.slice(at + asked.length)));
    return parent;
  }
  function select(label, options, value, change) {
    var field = element('label', '', label + ' '), list = element('select');
    options.forEach(function (option) {
      var made = element('option', '', option[1]);
      made.value = option[0]; made.selected = String(option[0]) === String(value); list.appendChild(made);
    });
    list.addEventListener('change', function () { change(list.value); });
    field.appendChild(list);
    return field;
  }
  // A list of ten thousand steps is nothing to choose from.
  function number() {
    var field = element('label', '', 'step '), input = element('input');
    input.type = 'number'; input.value = step; input.min = data.steps[0]; input.max = data.steps[data.steps.length - 1];
    input.addEventListener('change', function () { openStep(+input.value); });
    field.appendChild(input);
    return field;
  }
  function button(label, name, enabled, press) {
    var made = element('button', '', label);
    made.type = 'button'; made.disabled = !enabled; made.setAttribute('aria-label', name);
    made.addEventListener('click', press);
    return made;
  }

  // The look of a group in one line: each answer a cell, the better the greener.
  function strip(group, low, high) {
    var made = element('span', 'strip');
    group.rows.forEach(function (row) {
      var cell = element('i');
      if (row[2] === null) cell.className = 'none';
      else cell.style.setProperty('--share', high > low ? (row[2] - low) / (high - low) : 1);
      made.appendChild(cell);
    });
    made.setAttribute('aria-hidden', 'true');
    return made;
  }
  function numbers(group) {
    return [['reward', 2]].concat(group.parts.map(function (name, at) { return [name, 7, at]; }), [['advantage', 3], ['tokens', 4]]);
  }
  function answers(group) {
    var table = element('table', 'answers'), head = element('tr'), columns = numbers(group);
    head.appendChild(element('th', '', 'answer'));
    columns.forEach(function (c) { head.appendChild(element('th', 'num', c[0])); });
    table.appendChild(head);
    group.rows.forEach(function (row) {
      if (asked && !holds(row, group)) return;
      var line = element('tr'), cell = element('td', 'text'), failed = row[5] !== 'value';
      cell.appendChild(marked(element('div', 'said'), row[1]));
      if (failed || row[6] !== 'stop')
        cell.appendChild(element('span', 'label' + (failed ? ' failed' : ''), [failed ? row[5] : '', row[6] === 'length' ? 'cut off' : row[6] === 'stop' ? '' : row[6]].filter(Boolean).join(', ')));
      if (row[8]) cell.appendChild(heat(row[8]));
      line.appendChild(cell);
      columns.forEach(function (c) {
        var value = c.length > 2 ? row[7][c[2]] : row[c[1]], n = element('td', 'num');
        n.appendChild(element('span', 'label only-narrow', c[0] + ' '));
        n.appendChild(document.createTextNode(c[0] === 'advantage' && value > 0 ? '+' + text(value) : text(value)));
        if (c[0] === 'advantage' && value) n.classList.add(value > 0 ? 'better' : 'worse');
        line.appendChild(n);
      });
      table.appendChild(line);
    });
    return table;
  }
  // The tokens of an answer as a heat map: how improbable each was, how open the choice, or what it was trained with.
  function heat(tokens) {
    var made = element('details', 'heat'), place = element('div', 'said'), note = element('p', 'label'), first = element('summary', 'label', 'token by token');
    function tell(t) {
      note.textContent = t ? JSON.stringify(t[0]) + ' · log-prob ' + text(t[1]) + ' (' + text(100 * Math.exp(t[1])) + ' %) · advantage ' + text(t[2]) + ' · version ' + t[3] + (t.length > 4 ? ' · entropy ' + text(t[4]) : '') : 'Point at a token for its numbers.';
    }
    function paint(by) {
      var of = {advantage: 2, entropy: 4}[by], most = Math.max.apply(null, tokens.map(function (t) { return Math.abs(t[of]); })) || 1;
      place.textContent = '';
      tokens.forEach(function (t, at) {
        var cell = element('span', by === 'advantage' && t[2] > 0 ? 'up' : '', t[0] || '∅');
        cell.style.setProperty('--share', of ? Math.abs(t[of]) / most : 1 - Math.exp(t[1]));
        if (at && tokens[at - 1][3] !== t[3]) cell.classList.add('newer');
        ['pointerenter', 'click'].forEach(function (event) { cell.addEventListener(event, function () { tell(t); }); });
        place.appendChild(cell);
      });
      tell();
    }
    made.appendChild(first);
    made.appendChild(select('colour', [['logprob', 'how improbable it was'], ['entropy', 'entropy'], ['advantage', 'advantage']].filter(function (o) { return o[0] !== 'entropy' || tokens[0].length > 4; }), 'logprob', paint));
    made.appendChild(place); made.appendChild(note);
    paint('logprob');
    return made;
  }
  function card(group, low, high) {
    var made = element('details', 'group'), head = element('summary'), isFilled = false;
    if (asked) head.appendChild(element('span', 'label', 'step ' + group.step + ' '));
    head.appendChild(marked(element('span', 'ask'), group.prompt.trim() || group.id));
    head.appendChild(strip(group, low, high));
    head.appendChild(element('b', 'num', group.mean === null ? '–' : String(+group.mean.toPrecision(3))));
    made.appendChild(head);
    function fill() {
      if (isFilled || !made.open) return;
      isFilled = true;
      made.appendChild(element('p', 'label', group.id));
      made.appendChild(marked(element('div', 'said'), group.prompt));
      if (group.expected) {
        var line = element('p', 'label', 'expected ');
        line.appendChild(marked(element('code', 'expected'), group.expected));
        made.appendChild(line);
      }
      made.appendChild(answers(group));
    }
    made.addEventListener('toggle', fill);
    return made;
  }

  var bar = element('div', 'controls'), list = element('div'), foot = element('div', 'controls');
  var search = element('input'), stepPlace = element('span');
  search.type = 'search'; search.placeholder = 'search prompts and answers'; search.setAttribute('aria-label', search.placeholder);
  search.addEventListener('input', function () { asked = search.value.trim().toLowerCase(); page = 0; draw(); });
  bar.appendChild(stepPlace); bar.appendChild(search);
  bar.appendChild(select('show', Object.keys(KEPT).map(function (k) { return [k, KEPT[k][0]]; }), which, function (v) { which = v; page = 0; draw(); }));
  bar.appendChild(select('order', Object.keys(ORDERS).map(function (k) { return [k, ORDERS[k][0]]; }), order, function (v) { order = v; page = 0; draw(); }));
  place.textContent = '';
  [bar, list, foot].forEach(function (each) { place.appendChild(each); });

  function draw() {
    var all = groups(), rewards = [];
    all.forEach(function (g) { g.rows.forEach(function (r) { if (r[2] !== null) rewards.push(r[2]); }); });
    var low = Math.min.apply(null, rewards), high = Math.max.apply(null, rewards);
    var found = all.filter(KEPT[which][1]).filter(function (g) { return !asked || g.rows.some(function (r) { return holds(r, g); }); });
    if (order !== 'sampled') found = found.slice().sort(ORDERS[order][1]);
    var last = Math.max(0, Math.ceil(found.length / PER_PAGE) - 1), index = data.steps.indexOf(step);
    page = Math.min(page, last);
    stepPlace.textContent = '';
    stepPlace.appendChild(button('‹', 'step before', index > 0, function () { go(data.steps[index - 1]); }));
    stepPlace.appendChild(data.steps.length > 200 ? number() : select('step', data.steps.map(function (s) { return [s, s]; }), step, function (v) { go(+v); }));
    stepPlace.appendChild(button('›', 'step after', index < data.steps.length - 1, function () { go(data.steps[index + 1]); }));
    list.textContent = '';
    if (said) list.appendChild(element('p', 'label', said));
    if (asked) list.appendChild(searched());
    found.slice(page * PER_PAGE, (page + 1) * PER_PAGE).forEach(function (g) { list.appendChild(card(g, low, high)); });
    if (asked && found.length && list.querySelector('details')) list.querySelector('details').open = true;
    foot.textContent = '';
    foot.appendChild(button('‹', 'page before', page > 0, function () { page--; draw(); }));
    foot.appendChild(element('span', 'label', found.length ? 'groups ' + (page * PER_PAGE + 1) + ' to ' + Math.min(found.length, (page + 1) * PER_PAGE) + ' of ' + found.length + (found.length < all.length ? ' (' + all.length + ' in all)' : '') : 'no group is like that'));
    foot.appendChild(button('›', 'page after', page < last, function () { page++; draw(); }));
    if (waiting) foot.appendChild(element('span', 'label', 'reading…'));
    else if (data.next[step] !== undefined && data.live)
      foot.appendChild(button('more groups of this step', 'more groups', true, function () { ask(step, data.next[step]); }));
    else if (data.next[step] !== undefined) foot.appendChild(element('span', 'label', 'The step has more groups than this page holds.'));
  }
  function ask(wanted, from) {
    waiting = true;
    draw();
    fetch('report/rollouts?step=' + wanted + '&from=' + from).then(function (answer) {
      if (!answer.ok) throw new Error(answer.status);
      return answer.json();
    }).then(function (found) {
      pages[wanted] = (from ? pages[wanted] || [] : []).concat(found.groups);
      if (found.next === null) delete data.next[wanted]; else data.next[wanted] = found.next;
    }).catch(function () { said = 'The rollouts of step ' + wanted + ' could not be read.'; }).then(function () {
      waiting = false;
      draw();
    });
  }
  function go(wanted) {
    step = wanted; page = 0; said = ''; asked = search.value = '';
    if (data.live && !pages[step]) ask(step, 0); else draw();
  }
  openStep = function (wanted) {
    var best = data.steps.reduce(function (a, b) { return Math.abs(b - wanted) < Math.abs(a - wanted) ? b : a; });
    go(best);
    if (best !== wanted) { said = 'Rollouts of step ' + wanted + ' are not on this page: the nearest that are, of step ' + best + '.'; draw(); }
    place.scrollIntoView({block: 'start'});
  };
  document.addEventListener('click', function (event) {
    var link = event.target.closest('a[data-step]');
    if (link) { event.preventDefault(); openStep(+link.dataset.step); }
  });
  // Which steps there are by now, and the newest one's groups; what a reader has opened stays.
  document.addEventListener('fresh', function (event) {
    var now = event.detail.getElementById('rollout-data');
    if (!now) return;
    var newest = JSON.parse(now.textContent), reading = asked || page || list.querySelector('details[open]');
    var follows = step === data.steps[data.steps.length - 1] && !reading;
    data.steps = newest.steps;
    Object.keys(newest.pages).forEach(function (s) {
      pages[s] = newest.pages[s]; delete data.next[s];
      if (newest.next[s] !== undefined) data.next[s] = newest.next[s];
    });
    Object.keys(pages).slice(0, -20).forEach(function (s) { if (+s !== step) delete pages[s]; });
    if (follows) step = data.steps[data.steps.length - 1];
    if (!reading) draw();
  });
  draw();
})();
