// The report as the page sees it: candidates per cluster, totals per sample, groups of ops, reasons.
const ORIGINAL = 'torchscript';
const BACKENDS = ['disc', 'quant', 'onnxruntime', 'openvino', 'tensorrt', 'inductor', 'tvm'];
const NAMES = {
  torchscript: 'TorchScript', disc: 'DISC', quant: 'Quantized', onnxruntime: 'ONNX Runtime',
  openvino: 'OpenVINO', tensorrt: 'TensorRT', inductor: 'Inductor', tvm: 'TVM',
};
const report = JSON.parse($('report').textContent);
report.nodes = report.nodes || [];
report.inputs = report.inputs || [];

// Several engines by size are one backend here: "disc+onnxruntime", in the colour of the first.
const nameOf = (backend) => backend.split('+').map((one) => (Object.hasOwn(NAMES, one) ? NAMES[one] : one)).join(' + ');

// A backend keeps its colour in every report; those of other packages share what is left.
const colorOf = (() => {
  const others = new Map();
  return (backend) => {
    if (backend === ORIGINAL || !backend) return 'var(--original)';
    const first = backend.split('+')[0];
    const known = BACKENDS.indexOf(first);
    if (known >= 0) return `var(--backend-${known})`;
    if (!others.has(first)) others.set(first, others.size % 3);
    return `var(--other-${others.get(first)})`;
  };
})();

// What was tried on a cluster, the winner among it; reports of before `tried` know the winner alone.
function candidatesOf(cluster) {
  const tried = (cluster.tried || []).filter((one) => one.backend !== ORIGINAL && (one.timings || []).length);
  const known = tried.some((one) => one.backend === cluster.backend);
  if (cluster.backend === ORIGINAL || known || !cluster.timings.length) return tried;
  return [{ backend: cluster.backend, timings: cluster.timings, verdict: cluster.verdict }, ...tried];
}

const clusters = report.clusters.map((cluster, index) => {
  const candidates = candidatesOf(cluster);
  const chosen = candidates.find((one) => one.backend === cluster.backend) || null;
  const measured = chosen || candidates[0] || null;
  const original = measured ? measured.timings.map((t) => t.original_ms) : [];
  return {
    index, name: cluster.name, backend: cluster.backend, ops: cluster.ops, reasons: cluster.reasons,
    verdict: cluster.verdict, sizes: cluster.sizes || '', candidates, chosen, original,
    shapes: measured ? measured.timings.map((t) => t.shapes) : [],
    now: chosen ? chosen.timings.map((t) => t.engine_ms) : original,
    size: sum(Object.values(cluster.ops)),
    speedup: chosen ? geomean(chosen.timings.map((t) => t.original_ms / t.engine_ms)) : null,
  };
});
const clusterNamed = new Map(clusters.map((cluster) => [cluster.name, cluster]));

// The ways to put the whole module together that were measured; `null` where none was.
const whole = (() => {
  const measured = (report.compositions || []).filter((one) => one.timings.length);
  if (!measured.length) return null;
  const chosen = measured.find((one) => one.chosen) || null;
  const original = (chosen || measured[0]).timings.map((t) => t.original_ms);
  const candidates = measured.map((one) => {
    const backends = [...new Set(Object.values(one.engines))];
    return { label: nameOf(one.name), backend: backends.length === 1 ? backends[0] : null, timings: one.timings, wins: one.chosen };
  });
  return { name: 'whole model', backend: chosen ? null : ORIGINAL, original, candidates, chosen, now: chosen ? chosen.timings.map((t) => t.engine_ms) : original };
})();
const samples = Math.max(0, ...clusters.map((cluster) => cluster.original.length), whole ? whole.original.length : 0);

const spreadOf = (t) => (t ? { spread: t.spread, below: t.below, above: t.above } : { spread: 0 });

// Per sample: the whole model before and now, or, where it was not measured as a whole, all its measured clusters.
const totals = whole ? whole.original.map((before, i) => ({
  before, now: whole.now[i], speedup: before / whole.now[i], ...spreadOf(whole.chosen && whole.chosen.timings[i]),
})) : Array.from({ length: samples }, (_, i) => {
  const measured = clusters.filter((cluster) => i < cluster.original.length);
  const before = sum(measured.map((cluster) => cluster.original[i]));
  const now = sum(measured.map((cluster) => cluster.now[i]));
  return { before, now, speedup: now > 0 ? before / now : 1, spread: 0 };
});

// How a sample is called: by the shapes of the model's inputs, without repeating equal ones.
function sampleName(i) {
  const own = i < report.inputs.length ? report.inputs[i].map((input) => input.shape) : (clusters.find((c) => i < c.shapes.length) || { shapes: [] }).shapes[i];
  if (!own) return `sample ${i}`;
  return [...new Set(own.map((shape) => shape.join('×') || '()'))].slice(0, 4).join(', ');
}

// The position on the axis of the plot: the one size that differs between samples, else the elements.
const sizeAxis = (() => {
  const rows = report.inputs.length >= samples ? report.inputs.slice(0, samples).map((row) => row.map((input) => input.shape)) : [];
  if (!rows.length) {
    const first = clusters.find((cluster) => cluster.shapes.length === samples);
    return { label: 'elements of the inputs', values: first ? first.shapes.map(elements) : totals.map((_, i) => i) };
  }
  const varying = new Map();
  rows[0].forEach((shape, k) => shape.forEach((_, axis) => {
    const seen = rows.map((row) => row[k][axis]);
    if (new Set(seen).size > 1 && !varying.has(seen.join())) varying.set(seen.join(), { k, axis, seen });
  }));
  if (varying.size === 1) {
    const [{ k, axis, seen }] = varying.values();
    return { label: `size of dimension ${axis} of ${report.inputs[0][k].name}`, values: seen };
  }
  return { label: 'elements of the largest input', values: rows.map((row) => Math.max(...row.map((shape) => elements([shape])))) };
})();

function elements(list) {
  return sum(list.map((shape) => shape.reduce((a, b) => a * b, 1)));
}

// Equal decisions are one row, with the number of times; those of clusters say which.
const reasons = (() => {
  const rows = new Map();
  const add = (reason, where) => {
    const key = JSON.stringify([where, reason.stage, reason.code, reason.backend, reason.detail]);
    const row = rows.get(key);
    if (row) row.subjects.push(reason.subject);
    else rows.set(key, { ...reason, where, subjects: [reason.subject] });
  };
  report.reasons.forEach((reason) => add(reason, ''));
  report.clusters.forEach((cluster) => cluster.reasons.forEach((reason) => add(reason, cluster.name)));
  return [...rows.values()];
})();
const reasonsOf = new Map();
for (const reason of report.reasons) {
  if (!reasonsOf.has(reason.subject)) reasonsOf.set(reason.subject, []);
  reasonsOf.get(reason.subject).push(reason);
}

// The boxes of the graph: clusters, runs of ops that stay TorchScript, and single such ops.
const SMALLEST_RUN = 4;
const groups = (() => {
  const found = clusters.map((cluster) => ({ cluster, backend: cluster.backend, title: cluster.name, nodes: [] }));
  const byName = new Map(found.map((group) => [group.title, group]));
  let run = [];
  const flush = () => {
    const outside = (nodes) => found.push({ cluster: null, backend: ORIGINAL, title: nodes.length > 1 ? 'TorchScript' : kindOf(nodes[0]), nodes });
    if (run.length >= SMALLEST_RUN) outside(run);
    else run.forEach((node) => outside([node]));
    run = [];
  };
  report.nodes.forEach((node, i) => {
    const group = node.cluster === null ? null : byName.get(node.cluster);
    if (!group) { run.push(i); return; }
    flush();
    group.nodes.push(i);
  });
  flush();
  if (!report.nodes.length && Object.keys(report.outside).length) {
    found.push({ cluster: null, backend: ORIGINAL, title: 'TorchScript', nodes: [], size: sum(Object.values(report.outside)) });
  }
  found.forEach((group) => { group.size = group.size || group.nodes.length || (group.cluster ? group.cluster.size : 1); });
  const first = (group) => (group.nodes.length ? group.nodes[0] : Infinity);
  return found.sort((a, b) => first(a) - first(b));
})();

function kindOf(node) {
  return report.nodes[node].kind.replace(/^(aten|prim)::/, '');
}
