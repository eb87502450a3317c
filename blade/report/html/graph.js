// The drawing of the graph: pan, zoom, point, open. Drawn on demand only, and only what is in view.
const view = { x: 0, y: 0, scale: 1, touched: false };
const opened = new Set();
let scene = null;
let hovered = null;
let selected = null;
let queued = false;

const canvas = $('canvas');
const context = canvas.getContext('2d');
let colors = {};

function readColors() {
  const style = getComputedStyle(document.documentElement);
  const names = ['ink', 'muted', 'card', 'canvas', 'edge', 'accent', 'line', 'original', 'other-0', 'other-1', 'other-2', ...BACKENDS.map((_, i) => `backend-${i}`)];
  colors = Object.fromEntries(names.map((name) => [`var(--${name})`, style.getPropertyValue(`--${name}`).trim()]));
}
const paint = (name) => colors[name] || name;

function redraw() {
  if (queued) return;
  queued = true;
  requestAnimationFrame(() => { queued = false; draw(); });
}

function rebuild(fitted) {
  const { clientWidth, clientHeight } = canvas;
  const aspect = Math.max(0.4, Math.min(4, Math.round((clientWidth / Math.max(1, clientHeight)) * 4) / 4));
  hovered = null;
  scene = buildScene(opened, aspect);
  const all = groups.filter(canOpen).every((group) => opened.has(group));
  $('expand').textContent = all ? 'Hide ops' : 'Show ops';
  $('expand').hidden = !groups.some(canOpen);
  if (fitted) fit();
  redraw();
}

function resize() {
  const ratio = devicePixelRatio || 1;
  const [width, height] = [canvas.clientWidth, canvas.clientHeight].map((length) => Math.round(length * ratio));
  if (scene && canvas.width === width && canvas.height === height) return;
  canvas.width = width;
  canvas.height = height;
  rebuild(!view.touched);
  draw(); // at once: setting the size has cleared it
}

function fit() {
  const { clientWidth: w, clientHeight: h } = canvas;
  // Above are the buttons, below is the hint; lines run a little outside of the boxes.
  const [side, top, bottom] = [28, 60, 44];
  const scale = Math.min((w - 2 * side) / scene.width, (h - top - bottom) / scene.height);
  view.scale = Math.max(0.01, Math.min(1.25, scale));
  view.x = (w - scene.width * view.scale) / 2;
  view.y = top + (h - top - bottom - scene.height * view.scale) / 2;
  view.touched = false;
}

function zoom(factor, x = canvas.clientWidth / 2, y = canvas.clientHeight / 2) {
  const scale = Math.max(0.01, Math.min(4, view.scale * factor));
  view.x = x - ((x - view.x) * scale) / view.scale;
  view.y = y - ((y - view.y) * scale) / view.scale;
  view.scale = scale;
  view.touched = true;
  redraw();
}

function rounded(box, radius) {
  context.beginPath();
  context.roundRect(box.x, box.y, box.w, box.h, radius);
}

function draw() {
  const ratio = devicePixelRatio || 1;
  const { scale } = view;
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.fillStyle = paint('var(--canvas)');
  context.fillRect(0, 0, canvas.clientWidth, canvas.clientHeight);
  context.setTransform(ratio * scale, 0, 0, ratio * scale, ratio * view.x, ratio * view.y);
  stroke(scene.path, 'var(--edge)', Math.max(1.4, 0.8 / scale), 1);
  const seen = inView();
  const items = scene.groups.filter(seen);
  items.filter((item) => item.open).forEach(drawOpen);
  stroke(scene.inner, 'var(--edge)', Math.max(1, 0.6 / scale), scale < 0.3 ? 0.6 : 1);
  items.forEach((item) => {
    if (item.open) item.ops.filter(seen).forEach((op) => drawOp(op, item.group.backend));
    else if (isOp(item.group)) drawOp({ ...item, node: item.group.nodes[0] }, ORIGINAL);
    else drawClosed(item);
  });
  if (hovered) {
    stroke(linesOf(scene, hovered), 'var(--accent)', Math.max(1.8, 1.4 / scale), 1);
    outline(hovered.op || hovered.item, 'var(--accent)');
  }
  const chosen = selected && items.find((item) => item.group === selected);
  if (chosen) outline(chosen, 'var(--accent)');
}

function inView() {
  const left = -view.x / view.scale;
  const top = -view.y / view.scale;
  const right = left + canvas.clientWidth / view.scale;
  const bottom = top + canvas.clientHeight / view.scale;
  return (box) => box.x < right && box.x + box.w > left && box.y < bottom && box.y + box.h > top;
}

function stroke(path, color, width, alpha) {
  context.strokeStyle = paint(color);
  context.lineWidth = width;
  context.globalAlpha = alpha;
  context.stroke(path);
  context.globalAlpha = 1;
}

function outline(box, color) {
  rounded({ x: box.x - 2, y: box.y - 2, w: box.w + 4, h: box.h + 4 }, 8);
  context.strokeStyle = paint(color);
  context.lineWidth = Math.max(2, 1.6 / view.scale);
  context.stroke();
}

function filled(box, radius, color, alpha) {
  rounded(box, radius);
  context.fillStyle = paint('var(--card)');
  context.fill();
  context.globalAlpha = alpha;
  context.fillStyle = color;
  context.fill();
  context.globalAlpha = 1;
}

function drawOp(op, backend) {
  const color = paint(colorOf(backend));
  const small = view.scale < 0.42;
  filled(op, 6, color, small ? 0.62 : 0.17);
  if (small) return;
  context.strokeStyle = color;
  context.globalAlpha = 0.65;
  context.lineWidth = 1;
  context.stroke();
  context.globalAlpha = 1;
  text(clip(kindOf(op.node)), op.x + op.w / 2, op.y + op.h / 2 + 0.5, FONT.op, 'var(--ink)', 'center');
}

function drawOpen(item) {
  const color = paint(colorOf(item.group.backend));
  filled(item, 12, color, 0.07);
  context.strokeStyle = color;
  context.lineWidth = Math.max(1.2, 0.8 / view.scale);
  context.stroke();
  const title = titleOf(item.group);
  // Readable from afar: the title grows where the picture is small.
  const grown = Math.min(2.4, Math.max(1, 0.75 / view.scale), (item.w - 24) / titleWidth(item.group));
  context.save();
  context.translate(item.x + 14, item.y + HEADER / 2 + 3);
  context.scale(grown, grown);
  text(title, 0, 0, FONT.title, 'var(--ink)', 'left');
  context.restore();
}

function drawClosed(item) {
  const { group } = item;
  const color = paint(colorOf(group.backend));
  filled(item, 10, color, 0.14);
  context.strokeStyle = color;
  context.lineWidth = Math.max(1.4, 0.8 / view.scale);
  if (!group.cluster) context.setLineDash([5, 4]);
  context.stroke();
  context.setLineDash([]);
  if (view.scale < 0.2) return;
  const { cluster } = group;
  text(clip(group.title, 20), item.x + 14, item.y + (cluster ? 20 : item.h / 2), FONT.title, 'var(--ink)', 'left');
  text(count(group.size, 'op'), item.x + item.w - 14, item.y + (cluster ? 20 : item.h / 2), FONT.op, 'var(--muted)', 'right');
  if (!cluster) return;
  text(clip(nameOf(group.backend), 18), item.x + 14, item.y + 42, FONT.op, 'var(--muted)', 'left');
  if (cluster.speedup !== null) text(times(cluster.speedup), item.x + item.w - 14, item.y + 42, FONT.title, 'var(--ink)', 'right');
  const share = totals.length && cluster.original.length ? Math.min(1, cluster.original[0] / totals[0].before) : 0;
  context.fillStyle = color;
  context.fillRect(item.x + 14, item.y + item.h - 8, (item.w - 28) * share, 3);
}

function text(words, x, y, font, color, align) {
  context.font = font;
  context.textAlign = align;
  context.textBaseline = 'middle';
  context.fillStyle = paint(color);
  context.fillText(words, x, y);
}

function toggle(group) {
  if (!canOpen(group)) return;
  if (opened.has(group)) opened.delete(group);
  else opened.add(group);
  rebuild(true);
}

// Pointers: one moves, two pinch; a press that does not move selects.
function listen() {
  const pointers = new Map();
  let moved = false;
  let active = false;
  const at = (event) => {
    const { left, top } = canvas.getBoundingClientRect();
    return { x: event.clientX - left, y: event.clientY - top };
  };
  const find = ({ x, y }) => hitTest(scene, (x - view.x) / view.scale, (y - view.y) / view.scale);
  canvas.addEventListener('pointerdown', (event) => {
    canvas.setPointerCapture(event.pointerId);
    pointers.set(event.pointerId, at(event));
    moved = false;
    active = true;
    hideTip();
  });
  canvas.addEventListener('pointermove', (event) => {
    const here = at(event);
    const last = pointers.get(event.pointerId);
    if (!last) { point(event, find(here)); return; }
    if (Math.hypot(here.x - last.x, here.y - last.y) < 3 && !moved) return;
    moved = true;
    view.touched = true;
    if (pointers.size === 1) {
      view.x += here.x - last.x;
      view.y += here.y - last.y;
    } else {
      const [other] = [...pointers].filter(([id]) => id !== event.pointerId).map(([, p]) => p);
      const distance = (p) => Math.hypot(p.x - other.x, p.y - other.y) || 1;
      zoom(distance(here) / distance(last), (here.x + other.x) / 2, (here.y + other.y) / 2);
    }
    pointers.set(event.pointerId, here);
    redraw();
  });
  const release = (event) => {
    pointers.delete(event.pointerId);
    if (event.type !== 'pointerup' || moved) return;
    const hit = find(at(event));
    select(hit ? hit.item.group : null, hit);
  };
  canvas.addEventListener('pointerup', release);
  canvas.addEventListener('pointercancel', release);
  canvas.addEventListener('pointerleave', () => { point(null, null); });
  canvas.addEventListener('blur', () => { active = false; });
  canvas.addEventListener('dblclick', (event) => { const hit = find(at(event)); if (hit) toggle(hit.item.group); });
  canvas.addEventListener('wheel', (event) => {
    if (!event.ctrlKey && !event.metaKey && !active) return;
    event.preventDefault();
    const { x, y } = at(event);
    zoom(Math.exp(-event.deltaY * (event.deltaMode ? 0.05 : 0.0022)), x, y);
  }, { passive: false });
  canvas.addEventListener('keydown', (event) => {
    const moves = { ArrowLeft: [60, 0], ArrowRight: [-60, 0], ArrowUp: [0, 60], ArrowDown: [0, -60] };
    if (moves[event.key]) { view.x += moves[event.key][0]; view.y += moves[event.key][1]; view.touched = true; redraw(); }
    else if (event.key === '+' || event.key === '=') zoom(1.25);
    else if (event.key === '-') zoom(0.8);
    else if (event.key === '0') { fit(); redraw(); }
    else return;
    event.preventDefault();
  });
}

function point(event, hit) {
  const same = hovered && hit && hovered.item === hit.item && hovered.op === hit.op;
  if (!same) { hovered = hit; redraw(); }
  canvas.style.cursor = hit ? 'pointer' : 'grab';
  if (event && hit) showTip(event, linesAbout(hit));
  else hideTip();
}
