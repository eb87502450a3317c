// Fills the page, then wires theme, filters and selection.
const MOST_SAMPLES = 4;

function drawSummary() {
  const inside = sum(clusters.filter((c) => c.backend !== ORIGINAL).map((c) => c.size));
  const all = sum(clusters.map((c) => c.size)) + sum(Object.values(report.outside));
  const engines = clusters.filter((c) => c.backend !== ORIGINAL);
  const speed = totals.length ? geomean(totals.map((t) => t.speedup)) : null;
  const eachOf = totals.map((t) => t.speedup);
  const worst = Math.max(...engines.map((c) => (c.verdict ? c.verdict.error : 0)), 0);
  const fp64 = engines.map((c) => c.verdict && c.verdict.error_fp64).filter((e) => e !== null && e !== undefined);
  const checked = sum(engines.map((c) => (c.verdict ? c.verdict.checked : 0)));
  const took = sum(Object.values(report.seconds));
  const range = eachOf.length > 1 ? `${times(Math.min(...eachOf))} to ${times(Math.max(...eachOf))} over ${eachOf.length} samples` : 'at the sample';
  $('summary').replaceChildren(
    tile(whole ? 'Speed-up of the whole model' : 'Speed-up of what was measured', speed === null ? '–' : times(speed), speed === null ? 'nothing was measured' : range, 'big'),
    tile('Ops in engines', all ? `${Math.round((100 * inside) / all)}%` : '–', `${inside.toLocaleString('en')} of ${count(all, 'op')}`),
    tile('Clusters in engines', `${engines.length} of ${clusters.length}`, backendsUsed(engines)),
    tile('Largest error', engines.length ? error(worst) : '–', fp64.length ? `${error(Math.max(...fp64))} from fp64, ${count(checked, 'check')}` : count(checked, 'check')),
    tile('Time to optimize', seconds(took), slowestStage()));
  const names = report.inputs.map((row) => row.map((input) => `${input.name} ${input.shape.join('×') || '()'}`).join(', '));
  const shown = names.slice(0, MOST_SAMPLES).join('; ') + (names.length > MOST_SAMPLES ? `; and ${names.length - MOST_SAMPLES} more` : '');
  $('samples').textContent = [report.date ? `Optimized ${report.date}` : '', names.length ? `${count(names.length, 'sample')}: ${shown}` : ''].filter(Boolean).join(' · ');
  $('machine').textContent = [report.cpu, ...Object.entries(report.versions).map(([k, v]) => `${k} ${v}`)].filter(Boolean).join('  ·  ');
}

const tile = (label, value, note, kind = '') => el('div', { class: `tile ${kind}` }, el('span', { class: 'label' }, label), el('strong', {}, value), el('span', { class: 'muted' }, note));

function backendsUsed(engines) {
  const used = new Map();
  engines.forEach((c) => used.set(c.backend, (used.get(c.backend) || 0) + 1));
  return [...used].map(([backend, n]) => `${nameOf(backend)} ${n}`).join(', ') || 'the original serves all';
}

function slowestStage() {
  const [slowest] = Object.entries(report.seconds).sort((a, b) => b[1] - a[1]);
  return slowest ? `${slowest[0]} ${seconds(slowest[1])}` : 'not recorded';
}

function drawLegend() {
  const used = new Map();
  groups.forEach((group) => used.set(group.backend, (used.get(group.backend) || 0) + group.size));
  $('legend').replaceChildren(...[...used].sort((a, b) => b[1] - a[1]).map(([backend, n]) => el('span', { class: 'chip', color: colorOf(backend) }, `${nameOf(backend)} ${n.toLocaleString('en')}`)));
}

// The pane beside the graph: all clusters, or what is known of the selected one.
function select(group, hit) {
  selected = group || null;
  redraw();
  if (!group) { listClusters(); return; }
  const node = hit && hit.op ? hit.op.node : isOp(group) ? group.nodes[0] : null;
  const { cluster } = group;
  const back = el('button', { type: 'button', class: 'plain', onclick: () => select(null) }, '← all clusters');
  const open = canOpen(group) ? el('button', { type: 'button', onclick: () => { toggle(group); select(group); } }, opened.has(group) ? 'Hide its ops' : 'Show its ops') : null;
  const about = node === null ? [] : [el('h3', {}, report.nodes[node].name), ...linesAbout(hit || { item: { group }, op: null }).slice(1).map((line) => el('p', {}, line))];
  $('details').replaceChildren(...[back, ...about, ...(cluster ? aboutCluster(cluster) : node === null ? outsideOps(group) : []), open].filter(Boolean));
}

function aboutCluster(cluster) {
  const ops = Object.entries(cluster.ops).sort((a, b) => b[1] - a[1]);
  const verdict = cluster.verdict;
  const facts = [el('h3', {}, cluster.name), el('span', { class: 'chip', color: colorOf(cluster.backend) }, nameOf(cluster.backend)),
    el('p', {}, ops.slice(0, 10).map(([kind, n]) => `${n} ${kind.replace(/^aten::/, '')}`).join(', ') + (ops.length > 10 ? `, ${ops.length - 10} other kinds` : ''))];
  if (cluster.sizes) facts.push(el('p', {}, `By size: ${cluster.sizes}.`));
  if (cluster.candidates.length) facts.push(timingTable(cluster));
  if (verdict) facts.push(el('p', { class: 'muted' }, `Checked at ${count(verdict.checked, 'input')}` + (verdict.refused ? `, declined ${verdict.refused}` : '') + `. Largest error ${error(verdict.error)}` + (verdict.error_fp64 === null ? '.' : `; from fp64 ${error(verdict.error_fp64)}, the original ${error(verdict.original_error_fp64)}.`)));
  if (cluster.reasons.length) facts.push(el('ul', { class: 'reasons' }, cluster.reasons.map((r) => el('li', {}, el('strong', {}, `${r.backend ? nameOf(r.backend) : 'blade'}: ${r.code}. `), r.detail))));
  return facts;
}

function timingTable(cluster) {
  const rows = cluster.candidates.flatMap((one) => one.timings.map((t, i) => el('tr', { class: one.backend === cluster.backend ? 'wins' : '' },
    el('td', {}, i ? '' : nameOf(one.backend)), el('td', { title: shapes(t.shapes) }, sampleName(i)),
    el('td', { class: 'number' }, milliseconds(t.original_ms)), el('td', { class: 'number' }, milliseconds(t.engine_ms)), el('td', { class: 'number' }, times(t.original_ms / t.engine_ms)))));
  const head = ['', 'sample', 'before', 'after', ''].map((name) => el('th', {}, name));
  return el('div', { class: 'scroll' }, el('table', {}, el('thead', {}, el('tr', {}, head)), el('tbody', {}, rows)));
}

function outsideOps(group) {
  const kinds = new Map();
  group.nodes.forEach((node) => kinds.set(kindOf(node), (kinds.get(kindOf(node)) || 0) + 1));
  const own = group.nodes.flatMap((node) => reasonsOf.get(report.nodes[node].name) || []);
  const details = new Map(own.map((r) => [r.code + r.backend + r.detail, r]));
  return [el('h3', {}, `${count(group.size, 'op')} in TorchScript`),
    el('p', {}, [...kinds].sort((a, b) => b[1] - a[1]).slice(0, 12).map(([kind, n]) => `${n} ${kind}`).join(', ')),
    el('ul', { class: 'reasons' }, [...details.values()].slice(0, 12).map((r) => el('li', {}, el('strong', {}, `${r.backend ? nameOf(r.backend) : 'blade'}: ${r.code}. `), r.detail)))];
}

function listClusters() {
  const rows = clusters.map((cluster) => el('button', { type: 'button', class: 'row', onclick: () => select(groups.find((g) => g.cluster === cluster)) },
    el('span', { class: 'dot', color: colorOf(cluster.backend) }), el('span', { class: 'name' }, cluster.name),
    el('span', { class: 'muted' }, count(cluster.size, 'op')), el('strong', {}, cluster.speedup === null ? '' : times(cluster.speedup))));
  const empty = el('p', { class: 'muted' }, 'No cluster was found; the table below says why.');
  $('details').replaceChildren(el('h3', {}, 'Clusters'), ...(rows.length ? rows : [empty]));
}

const MOST_ROWS = 100;

// Reasons grouped by backend, blade's own first.
function drawReasons() {
  const state = { words: '', stage: '', code: '', all: false };
  const choose = (name) => {
    const values = [...new Set(reasons.map((r) => r[name] || ''))].filter(Boolean).sort();
    return el('select', { 'aria-label': name, onchange: (event) => { state[name] = event.target.value; fill(); } },
      el('option', { value: '' }, `any ${name}`), values.map((value) => el('option', { value }, value)));
  };
  const box = el('input', { type: 'search', placeholder: 'Filter', 'aria-label': 'Filter reasons', oninput: (event) => { state.words = event.target.value.toLowerCase(); fill(); } });
  const body = el('div', {});
  const more = el('div', {});
  const fill = () => {
    const words = state.words.split(/\s+/).filter(Boolean);
    const fits = (r) => ['stage', 'code'].every((name) => !state[name] || r[name] === state[name])
      && words.every((word) => [r.where, r.stage, r.code, r.backend, r.detail, r.error, ...r.subjects].join(' ').toLowerCase().includes(word));
    const found = reasons.filter(fits);
    const shown = state.all ? found : found.slice(0, MOST_ROWS);
    const byBackend = new Map();
    for (const r of shown) {
      const name = r.backend || '';
      if (!byBackend.has(name)) byBackend.set(name, []);
      byBackend.get(name).push(r);
    }
    body.replaceChildren(...[...byBackend].sort((a, b) => (a[0] ? 1 : 0) - (b[0] ? 1 : 0)).map(([name, own]) => reasonGroup(name, own)));
    if (!found.length) body.append(el('p', { class: 'muted' }, reasons.length ? 'None fits the filter.' : 'Nothing was decided against anything.'));
    more.replaceChildren(...(found.length > shown.length ? [el('button', { type: 'button', onclick: () => { state.all = true; fill(); } }, `Show all ${found.length}`)] : []));
  };
  $('filters').replaceChildren(box, choose('stage'), choose('code'));
  $('reasons').replaceChildren(body, more);
  fill();
}

// The counts by code; opened, a row per reason.
function reasonGroup(backend, own) {
  const codes = new Map();
  own.forEach((r) => codes.set(r.code, (codes.get(r.code) || 0) + r.subjects.length));
  const title = el('summary', {}, el('span', { class: 'chip', color: colorOf(backend) }, backend ? nameOf(backend) : 'blade'),
    ` ${[...codes].map(([code, n]) => `${n} ${code}`).join(', ')}`);
  const head = ['where', 'stage', 'code', 'subject', 'detail'].map((name) => el('th', {}, name));
  const table = el('table', { class: 'wide' }, el('thead', {}, el('tr', {}, head)), el('tbody', {}, own.map(reasonRow)));
  return el('details', { class: 'backend', open: own.length <= 3 }, title, el('div', { class: 'scroll' }, table));
}

function reasonRow(r) {
  const [first, ...rest] = [...new Set(r.subjects)];
  const detail = el('td', { class: 'detail' }, r.detail);
  if (r.error) detail.append(el('details', {}, el('summary', {}, 'error'), el('pre', {}, r.error)));
  const subject = el('td', { class: 'subject', title: [first, ...rest].slice(0, 30).join('\n') }, first);
  if (r.subjects.length > 1) subject.append(el('span', { class: 'muted' }, ` and ${r.subjects.length - 1} more`));
  return el('tr', {}, el('td', {}, r.where || 'model'), el('td', {}, r.stage), el('td', {}, el('code', {}, r.code)), subject, detail);
}

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  $('theme').textContent = theme === 'dark' ? 'Light' : 'Dark';
  readColors();
  if (scene) redraw();
}

function start() {
  const asked = new URLSearchParams(location.hash.slice(1));
  const dark = matchMedia('(prefers-color-scheme: dark)');
  setTheme(asked.get('theme') || (dark.matches ? 'dark' : 'light'));
  dark.addEventListener('change', () => setTheme(dark.matches ? 'dark' : 'light'));
  $('theme').addEventListener('click', () => setTheme(document.documentElement.dataset.theme === 'dark' ? 'light' : 'dark'));
  drawSummary();
  drawLegend();
  listClusters();
  $('sample').replaceChildren(...totals.map((_, i) => el('option', { value: i }, sampleName(i))));
  $('sample').addEventListener('change', (event) => drawBars(Number(event.target.value), false));
  drawBars(0, false);
  drawPlot();
  drawKernels();
  drawReasons();
  drawBuilt();
  const ops = sum(groups.map((group) => group.size));
  if (asked.has('ops') || (ops <= 400 && groups.length <= 6)) groups.filter(canOpen).forEach((group) => opened.add(group));
  $('zoom-in').addEventListener('click', () => zoom(1.3));
  $('zoom-out').addEventListener('click', () => zoom(1 / 1.3));
  $('fit').addEventListener('click', () => { fit(); redraw(); });
  $('expand').addEventListener('click', () => {
    const closed = groups.filter((group) => canOpen(group) && !opened.has(group));
    if (closed.length) closed.forEach((group) => opened.add(group));
    else opened.clear();
    rebuild(true);
  });
  canvas.setAttribute('aria-label', `Graph of ${count(ops, 'op')} in ${count(groups.length, 'box', 'boxes')}`);
  resize();
  new ResizeObserver(resize).observe(canvas);
  listen();
  document.documentElement.dataset.ready = String(groups.length);
}

start();
