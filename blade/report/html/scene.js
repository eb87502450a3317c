// From groups to a picture: the ops of an open group are laid out inside its box, then the boxes themselves.
const GAPS = { ops: { x: 10, y: 13, column: 38 }, groups: { x: 26, y: 30, column: 70 } };
const FONT = { op: '500 11px ui-sans-serif, system-ui, sans-serif', title: '600 13px ui-sans-serif, system-ui, sans-serif' };
const HEADER = 30;
const PADDING = 14;

const groupOf = new Map();
groups.forEach((group, g) => group.nodes.forEach((node) => groupOf.set(node, g)));

// Edges between groups, once each.
const groupEdges = (() => {
  const seen = new Set();
  report.nodes.forEach((node, b) => node.inputs.forEach((a) => {
    const from = groupOf.get(a);
    const to = groupOf.get(b);
    if (from !== undefined && to !== undefined && from !== to) seen.add(from * groups.length + to);
  }));
  return [...seen].map((key) => [Math.floor(key / groups.length), key % groups.length]);
})();

const isOp = (group) => !group.cluster && group.nodes.length === 1;
const canOpen = (group) => group.nodes.length > 1;

const widthOf = (() => {
  const context = document.createElement('canvas').getContext('2d');
  const known = new Map();
  return (text) => {
    context.font = FONT.op;
    if (!known.has(text)) known.set(text, context.measureText(text).width);
    return known.get(text);
  };
})();
const opSize = (node) => ({ w: Math.ceil(Math.max(44, widthOf(clip(kindOf(node))) + 18)), h: 24 });
const clip = (text, most = 26) => (text.length > most ? text.slice(0, most - 1) + '…' : text);

// What stands above the ops of an open group.
function titleOf({ cluster, title, backend, size }) {
  if (!cluster) return `${title}, ${count(size, 'op')}`;
  return `${clip(title)}   ${clip(nameOf(backend))}` + (cluster.speedup === null ? '' : `   ${times(cluster.speedup)}`);
}
const titleWidth = (group) => widthOf(titleOf(group)) * 1.35; // measured in the font of ops

// The ops of a group among themselves; kept, since it only depends on the shape of the window.
function insideOf(group, aspect) {
  if (group.inside && group.inside.aspect === aspect) return group.inside;
  const position = new Map(group.nodes.map((node, i) => [node, i]));
  const edges = [];
  group.nodes.forEach((node, b) => new Set(report.nodes[node].inputs).forEach((a) => {
    if (position.has(a)) edges.push([position.get(a), b]);
  }));
  const layout = layoutGraph(group.nodes.map(opSize), edges, aspect, GAPS.ops);
  const path = new Path2D();
  edges.forEach(([a, b]) => route(path, layout, layout.boxes[a], layout.boxes[b], GAPS.ops));
  group.inside = { aspect, layout, path, edges };
  return group.inside;
}

function sizeOf(group, open, aspect) {
  if (isOp(group)) return opSize(group.nodes[0]);
  if (!open) return { w: group.cluster ? 190 : 168, h: group.cluster ? 62 : 44 };
  const { layout } = insideOf(group, aspect);
  return { w: Math.max(titleWidth(group) + 28, layout.width + 2 * PADDING + 24), h: layout.height + HEADER + 2 * PADDING };
}

// {groups: [{group, x, y, w, h, open, ops: [{node, x, y, w, h}]}], path, inner, width, height}
function buildScene(opened, aspect) {
  const open = groups.map((group) => opened.has(group) && canOpen(group));
  const only = groups.length === 1 || open.filter(Boolean).length === 1;
  const within = only ? aspect : Math.min(aspect, 1.3);
  const sizes = groups.map((group, g) => sizeOf(group, open[g], within));
  const layout = layoutGraph(sizes, groupEdges, aspect, GAPS.groups);
  const path = new Path2D();
  groupEdges.forEach(([a, b]) => route(path, layout, layout.boxes[a], layout.boxes[b], GAPS.groups));
  const inner = new Path2D();
  const placed = groups.map((group, g) => {
    const box = layout.boxes[g];
    const item = { group, open: open[g], ops: [], ...box };
    if (!open[g]) return item;
    const { layout: inside, path: lines } = insideOf(group, within);
    const dx = box.x + (box.w - inside.width) / 2;
    const dy = box.y + HEADER + PADDING;
    inner.addPath(lines, new DOMMatrix([1, 0, 0, 1, dx, dy]));
    item.ops = inside.boxes.map((op, i) => ({ ...op, node: group.nodes[i], local: op, x: op.x + dx, y: op.y + dy }));
    item.offset = { dx, dy };
    return item;
  });
  return { groups: placed, layout, path, inner, width: layout.width, height: layout.height };
}

// The lines to and from one thing that is pointed at.
function linesOf(scene, hit) {
  const path = new Path2D();
  if (hit.op) {
    const { item } = hit;
    const { layout, edges } = item.group.inside;
    const local = new Path2D();
    const own = item.ops.indexOf(hit.op);
    edges.filter(([a, b]) => a === own || b === own).forEach(([a, b]) => route(local, layout, layout.boxes[a], layout.boxes[b], GAPS.ops));
    path.addPath(local, new DOMMatrix([1, 0, 0, 1, item.offset.dx, item.offset.dy]));
    return path;
  }
  const own = groups.indexOf(hit.item.group);
  groupEdges.filter(([a, b]) => a === own || b === own).forEach(([a, b]) => route(path, scene.layout, scene.layout.boxes[a], scene.layout.boxes[b], GAPS.groups));
  return path;
}

function hitTest(scene, x, y) {
  const within = (box) => x >= box.x && x <= box.x + box.w && y >= box.y && y <= box.y + box.h;
  const item = scene.groups.find(within);
  return item ? { item, op: item.ops.find(within) || null } : null;
}

// What there is to say about a hit, shortest first.
function linesAbout({ item, op }) {
  const { group } = item;
  const node = op ? op.node : isOp(group) ? group.nodes[0] : null;
  if (node === null) return aboutGroup(group);
  const shown = report.nodes[node];
  const own = (reasonsOf.get(shown.name) || []).map((r) => `${r.code}${r.backend ? ' (' + nameOf(r.backend) + ')' : ''}: ${r.detail}`);
  return [shown.name, shown.source, group.cluster ? `${group.cluster.name}, ${nameOf(group.backend)}` : nameOf(ORIGINAL), ...own].filter(Boolean);
}

function aboutGroup(group) {
  const { cluster } = group;
  if (!cluster) return [`${count(group.size, 'op')} in TorchScript`, 'Not in any cluster; open the box to see why, op by op.'];
  const lines = [`${cluster.name}: ${nameOf(cluster.backend)}`, count(cluster.size, 'op')];
  if (cluster.speedup !== null) lines.push(`${times(cluster.speedup)} the speed of the original`);
  cluster.reasons.slice(0, 6).forEach((r) => lines.push(`${r.backend ? nameOf(r.backend) : 'blade'}: ${r.code}: ${r.detail}`));
  if (cluster.reasons.length > 6) lines.push(`and ${cluster.reasons.length - 6} more`);
  return lines;
}
