// Bars of time per cluster, the plot of speed-up against size, and the stages of optimize.
const MOST_BARS = 6;

// One block per cluster at the chosen sample; where that is little, at every sample.
function drawBars(sample, all) {
  const every = (clusters.length + (whole ? 1 : 0)) * samples <= MOST_BARS;
  const chosen = every ? totals.map((_, i) => i) : [sample];
  $('sample').hidden = every || samples < 2;
  const rows = chosen.flatMap((i) => [...(whole ? [whole] : []), ...[...clusters].sort((a, b) => b.original[i] - a.original[i])]
    .filter((one) => i < one.original.length).map((cluster) => ({ cluster, sample: i })));
  const shown = all || every ? rows : rows.slice(0, MOST_BARS);
  const most = new Map(chosen.map((i) => [i, Math.max(0, ...rows.filter((row) => row.sample === i)
    .flatMap(({ cluster }) => [cluster.original[i], ...cluster.candidates.map((one) => engineAt(one, i)).filter(Number.isFinite)]))]));
  $('bars').replaceChildren(...shown.map((row) => barsOf(row.cluster, row.sample, most.get(row.sample), every && samples > 1)));
  if (!rows.length) $('bars').append(el('p', { class: 'muted' }, 'Nothing was measured: no engine was verified, or Config(timing=False).'));
  if (rows.length > shown.length) $('bars').append(el('button', { type: 'button', onclick: () => drawBars(sample, true) }, `Show all ${rows.length} clusters`));
}

function barsOf(cluster, sample, most, named) {
  const found = groups.find((g) => g.cluster === cluster);
  const name = found ? el('button', { class: 'plain name', type: 'button', onclick: () => select(found) }, cluster.name) : el('strong', {}, cluster.name);
  const original = bar('TorchScript', ORIGINAL, cluster.original[sample], most, cluster.backend === ORIGINAL, [`${cluster.name}: the original`, milliseconds(cluster.original[sample])]);
  const engines = cluster.candidates.filter((one) => Number.isFinite(engineAt(one, sample))).map((one) => {
    const t = one.timings[sample];
    const label = one.label || nameOf(one.backend);
    const lines = [`${cluster.name}: ${label}`, `${milliseconds(t.engine_ms)} against ${milliseconds(t.original_ms)}: ${times(t.original_ms / t.engine_ms)} (${times(limits(t)[0])} to ${times(limits(t)[1])})`, shapes(t.shapes)];
    return bar(label, one.backend, t.engine_ms, most, one.wins || one.backend === cluster.backend, lines);
  });
  return el('div', { class: 'cluster-bars' }, el('div', { class: 'head' }, name, named ? el('span', { class: 'muted' }, sampleName(sample)) : null), original, engines);
}

// The limits of the speed-up; older files know only the larger distance of the two.
function limits(t) {
  const [below, above] = [t.below ?? t.spread, t.above ?? t.spread];
  return [t.original_ms / t.engine_ms / (1 + below), (t.original_ms / t.engine_ms) * (1 + above)];
}

const engineAt = (candidate, sample) => (candidate.timings[sample] || { engine_ms: NaN }).engine_ms;

function bar(label, backend, ms, most, wins, lines) {
  const fill = el('span', { class: wins ? 'fill wins' : 'fill', color: backend ? colorOf(backend) : 'var(--accent)' });
  fill.style.width = `${most > 0 ? Math.max(0.4, (100 * ms) / most) : 0}%`;
  return el('div', { class: wins ? 'bar wins' : 'bar', ...tips(lines) },
    el('span', { class: 'label' }, label), el('span', { class: 'track' }, fill), el('span', { class: 'value' }, milliseconds(ms)));
}

const MOST_KERNELS = 12;

// Per cluster that has them, its kernels at the last sample, the longest first.
function drawKernels() {
  const shown = report.clusters.filter((cluster) => (cluster.kernels || []).some((kernel) => kernel.ms.length));
  $('kernel-card').hidden = !shown.length;
  $('kernels').replaceChildren(...shown.map(kernelBars));
}

function kernelBars(cluster) {
  const last = (kernel) => kernel.ms[kernel.ms.length - 1];
  const all = cluster.kernels.filter((kernel) => kernel.ms.length).sort((a, b) => last(b) - last(a));
  const total = sum(all.map(last));
  const bars = all.slice(0, MOST_KERNELS).map((kernel) => {
    const name = kernel.calls > 1 ? `${kernel.calls} × ${kernel.name}` : kernel.name;
    const share = total > 0 ? `${((100 * last(kernel)) / total).toFixed(0)}%` : '';
    const lines = [name, kernel.ops || 'a library kernel', `${milliseconds(last(kernel))}, ${share} of the cluster`];
    const row = bar(kernel.ops ? `${name}: ${kernel.ops}` : name, cluster.backend, last(kernel), total, false, lines);
    row.classList.add('kernel');
    return row;
  });
  const rest = all.slice(MOST_KERNELS);
  if (rest.length) bars.push(bar(`${rest.length} others`, cluster.backend, sum(rest.map(last)), total, false, [`${rest.length} others`]));
  const sample = all.length ? all[0].ms.length - 1 : 0;
  const head = el('div', { class: 'head' }, el('strong', {}, cluster.name), el('span', { class: 'muted' }, `${milliseconds(total)} at ${sampleName(sample)}`));
  return el('div', { class: 'cluster-bars' }, head, bars);
}

// Ticks at 1, 2 and 5 times powers of ten.
function ticks(low, high, wanted) {
  const raw = (high - low) / wanted || 1;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= raw);
  const found = [];
  for (let v = Math.ceil(low / step - 1e-9) * step; v <= high + step * 1e-6; v += step) found.push(Number(v.toPrecision(12)));
  return found;
}

const MOST_LINES = 6;

function drawPlot() {
  const measured = clusters.filter((cluster) => cluster.chosen);
  if (!measured.length || !totals.length) {
    $('plot').replaceChildren(el('p', { class: 'muted' }, 'No engine serves, so there is no speed-up to show.'));
    return;
  }
  const order = sizeAxis.values.map((_, i) => i).filter((i) => i < totals.length).sort((a, b) => sizeAxis.values[a] - sizeAxis.values[b]);
  const series = measured.length < 2 && !whole ? [] : [...measured].sort((a, b) => (b.original[0] || 0) - (a.original[0] || 0)).slice(0, MOST_LINES).map((cluster) => ({
    name: cluster.name, color: colorOf(cluster.backend), thin: true,
    points: order.filter((i) => i < cluster.chosen.timings.length).map((i) => pointAt(i, cluster.chosen.timings[i])),
  }));
  const only = !whole && measured.length === 1 && clusters.length === 1;
  series.push({
    name: only ? measured[0].name : whole ? 'whole model' : 'all clusters', color: only ? colorOf(measured[0].backend) : 'var(--accent)', thin: false,
    points: order.map((i) => pointAt(i, only ? measured[0].chosen.timings[i] : { original_ms: totals[i].before, engine_ms: totals[i].now, spread: totals[i].spread, below: totals[i].below, above: totals[i].above })),
  });
  $('plot').replaceChildren(...present([plot(series), el('p', { class: 'axis-label' }, sizeAxis.label), legendOf(series)]));
}

const pointAt = (i, t) => ({ x: sizeAxis.values[i], y: t.original_ms / t.engine_ms, spread: t.spread, limits: limits(t), sample: i, ms: [t.original_ms, t.engine_ms] });

function legendOf(series) {
  if (series.length < 2) return null;
  return el('div', { class: 'legend' }, series.map((one) => el('span', { class: one.thin ? 'chip' : 'chip thick', color: one.color }, one.name)));
}

function plot(series) {
  const [width, height, left, right, top, bottom] = [520, 250, 44, 16, 12, 28];
  const points = series.flatMap((one) => one.points);
  const xs = points.map((p) => p.x);
  const logarithmic = Math.min(...xs) > 0 && Math.max(...xs) / Math.min(...xs) > 8;
  const scaled = logarithmic ? Math.log : (v) => v;
  const [lowX, highX] = [scaled(Math.min(...xs)), scaled(Math.max(...xs))];
  const highY = Math.max(1.25, ...points.map((p) => p.y * (1 + Math.min(p.spread, 0.25)))) * 1.06;
  const lowY = Math.min(...points.map((p) => p.y)) < 0.6 ? 0 : 0.5;
  const X = (x) => (highX > lowX ? left + 14 + ((scaled(x) - lowX) / (highX - lowX)) * (width - left - right - 28) : (left + width - right) / 2);
  const Y = (y) => height - bottom - ((y - lowY) / (highY - lowY)) * (height - top - bottom);
  const made = svg('svg', { viewBox: `0 0 ${width} ${height}`, role: 'img', 'aria-label': 'Speed-up against size' });
  for (const y of ticks(lowY, highY, 5)) {
    made.append(svg('line', { class: y === 1 ? 'one' : 'grid', x1: left, x2: width - right, y1: Y(y), y2: Y(y) }),
      svg('text', { class: 'tick', x: left - 8, y: Y(y) + 4, 'text-anchor': 'end' }, `${y}×`));
  }
  if (!ticks(lowY, highY, 5).includes(1)) made.append(svg('line', { class: 'one', x1: left, x2: width - right, y1: Y(1), y2: Y(1) }));
  let last = -Infinity;
  for (const x of [...new Set(xs)].sort((a, b) => a - b)) {
    if (X(x) - last < 40) continue;
    last = X(x);
    made.append(svg('text', { class: 'tick', x: last, y: height - 8, 'text-anchor': 'middle' }, x.toLocaleString('en')));
  }
  for (const one of series) {
    const line = one.points.map((p, i) => `${i ? 'L' : 'M'}${X(p.x)} ${Y(p.y)}`).join('');
    made.append(svg('path', { class: one.thin ? 'line thin' : 'line', color: one.color, d: line }));
    for (const p of one.points) {
      const lines = [`${one.name}: ${times(p.y)} (${times(p.limits[0])} to ${times(p.limits[1])})`, sampleName(p.sample), `${milliseconds(p.ms[0])} → ${milliseconds(p.ms[1])}`];
      if (p.spread) made.append(svg('line', { class: 'spread', color: one.color, x1: X(p.x), x2: X(p.x), y1: Y(Math.max(lowY, p.limits[0])), y2: Y(Math.min(highY, p.limits[1])) }));
      made.append(svg('circle', { class: 'dot', color: one.color, cx: X(p.x), cy: Y(p.y), r: one.thin ? 3 : 4.5, ...tips(lines) }));
    }
  }
  return made;
}

function drawBuilt() {
  const stages = Object.entries(report.seconds);
  const total = sum(stages.map(([, s]) => s));
  const track = el('div', { class: 'stages' }, stages.map(([name, s], i) => {
    const part = el('span', { class: `stage-${i % 6}`, ...tips([name, seconds(s)]) });
    part.style.flexGrow = String(Math.max(s / (total || 1), 0.004));
    return part;
  }));
  const key = el('div', { class: 'legend' }, stages.map(([name, s], i) => el('span', { class: `chip chip-${i % 6}` }, `${name} ${seconds(s)}`)));
  const facts = [['Machine', report.cpu || 'unknown'], ...Object.entries(report.versions), ...report.inputs.map((row, i) => [
    `Sample ${i}`, row.map((input) => `${input.name}: ${input.dtype}[${input.shape.join(', ')}]`).join(', ')])];
  $('built').replaceChildren(
    ...(stages.length ? [el('p', { class: 'muted' }, `optimize took ${seconds(total)}`), track, key] : []),
    el('dl', {}, facts.slice(0, 40).map(([name, value]) => [el('dt', {}, name), el('dd', {}, value)])));
}
