// Layered drawing (Sugiyama, Tagawa and Toda 1981): layers by longest path, order by barycenters, positions by
// isotonic regression. A graph of a thousand layers would be a hairline, so layers run in columns, as text does.

// sizes: [{w, h}], edges: [[from, to]]; returns {boxes: [{x, y, w, h, layer, column}], width, height, gutters}.
function layoutGraph(sizes, edges, aspect, gap) {
  const count = sizes.length;
  if (!count) return { boxes: [], width: 0, height: 0, columns: [] };
  const rank = orderOf(count, edges);
  const before = Array.from({ length: count }, () => []);
  const after = Array.from({ length: count }, () => []);
  for (const [a, b] of edges) {
    if (rank[a] < rank[b]) { after[a].push(b); before[b].push(a); }
  }
  const layers = layersOf(rank, before, after);
  arrange(layers, before, after);
  const center = centers(layers, sizes, before, after, gap.x);
  return inColumns(layers, sizes, center, aspect, gap);
}

// A topological order that prefers the given one; an edge of a cycle may point backwards in it.
function orderOf(count, edges) {
  const waiting = new Array(count).fill(0);
  const after = Array.from({ length: count }, () => []);
  for (const [a, b] of edges) {
    if (a !== b) { waiting[b] += 1; after[a].push(b); }
  }
  const rank = new Array(count).fill(-1);
  const ready = waiting.flatMap((n, v) => (n ? [] : [v]));
  let next = 0;
  let unseen = 0;
  for (let head = 0; next < count; ) {
    let v;
    if (head < ready.length) v = ready[head++];
    else {
      while (rank[unseen] >= 0) unseen += 1;
      v = unseen;
    }
    if (rank[v] >= 0) continue;
    rank[v] = next++;
    for (const w of after[v]) if (--waiting[w] === 0 && rank[w] < 0) ready.push(w);
  }
  return rank;
}

function layersOf(rank, before, after) {
  const order = rank.map((_, v) => v).sort((a, b) => rank[a] - rank[b]);
  const layer = new Array(rank.length).fill(0);
  for (const v of order) for (const u of before[v]) layer[v] = Math.max(layer[v], layer[u] + 1);
  // What nothing precedes stands right above its first reader.
  for (const v of order.reverse()) {
    if (!before[v].length && after[v].length) layer[v] = Math.min(...after[v].map((w) => layer[w])) - 1;
  }
  const layers = [];
  order.reverse().forEach((v) => { (layers[layer[v]] = layers[layer[v]] || []).push(v); });
  return layers.filter(Boolean);
}

// Sorts each layer by the mean position of its neighbours, down and up in turns.
function arrange(layers, before, after) {
  const place = new Map();
  const note = (layer) => layer.forEach((v, i) => place.set(v, (i + 0.5) / layer.length));
  layers.forEach(note);
  const sweep = (list, near) => list.forEach((layer) => {
    if (layer.length < 2) return;
    const wish = new Map(layer.map((v) => [v, near[v].length ? sum(near[v].map((u) => place.get(u))) / near[v].length : place.get(v)]));
    layer.sort((a, b) => wish.get(a) - wish.get(b));
    note(layer);
  });
  for (let round = 0; round < 3; round += 1) {
    sweep(layers, before);
    sweep([...layers].reverse(), after);
  }
}

// Each node as near to its neighbours' middle as those beside it in its layer permit.
function centers(layers, sizes, before, after, gap) {
  const center = new Array(sizes.length).fill(0);
  layers.forEach((layer) => spread(layer, sizes, center, gap));
  const pull = (list, near) => list.forEach((layer) => {
    layer.forEach((v) => { if (near[v].length) center[v] = sum(near[v].map((u) => center[u])) / near[v].length; });
    spread(layer, sizes, center, gap);
  });
  for (let round = 0; round < 2; round += 1) {
    pull(layers, before);
    pull([...layers].reverse(), after);
  }
  pull(layers, before);
  return center;
}

// Pool adjacent violators: the nearest centers, by least squares, that keep order and distance.
function spread(layer, sizes, center, gap) {
  const offsets = [];
  const pools = [];
  layer.forEach((v, i) => {
    offsets.push(i ? offsets[i - 1] + (sizes[layer[i - 1]].w + sizes[v].w) / 2 + gap : 0);
    let pool = { total: center[v] - offsets[i], count: 1 };
    while (pools.length && pools[pools.length - 1].total / pools[pools.length - 1].count > pool.total / pool.count) {
      const last = pools.pop();
      pool = { total: pool.total + last.total, count: pool.count + last.count };
    }
    pools.push(pool);
  });
  let i = 0;
  for (const pool of pools) {
    for (let k = 0; k < pool.count; k += 1, i += 1) center[layer[i]] = pool.total / pool.count + offsets[i];
  }
}

// As many columns as bring the whole near to `aspect` (width : height).
function inColumns(layers, sizes, center, aspect, gap) {
  const heights = layers.map((layer) => Math.max(...layer.map((v) => sizes[v].h)) + gap.y);
  const spans = layers.map((layer) => {
    const left = Math.min(...layer.map((v) => center[v] - sizes[v].w / 2));
    return [left, Math.max(...layer.map((v) => center[v] + sizes[v].w / 2))];
  });
  const total = sum(heights);
  const typical = spans.map(([a, b]) => b - a).sort((a, b) => a - b)[Math.floor(spans.length * 0.9)];
  const wanted = Math.max(1, Math.round(Math.sqrt((aspect * total) / (typical + gap.column))));
  const limit = total / wanted + Math.max(...heights);
  const boxes = new Array(sizes.length);
  const columns = [];
  let x = 0;
  let height = 0;
  for (let start = 0; start < layers.length; ) {
    let end = start;
    let y = 0;
    while (end < layers.length && (end === start || y + heights[end] <= limit)) y += heights[end++];
    const left = Math.min(...spans.slice(start, end).map(([a]) => a));
    const right = Math.max(...spans.slice(start, end).map(([, b]) => b));
    let top = 0;
    for (let k = start; k < end; k += 1) {
      for (const v of layers[k]) {
        const { w, h } = sizes[v];
        const slack = (heights[k] - gap.y - h) / 2;
        boxes[v] = { x: x + center[v] - left - w / 2, y: top + slack, w, h, layer: k, column: columns.length };
      }
      top += heights[k];
    }
    columns.push({ left: x, right: x + right - left });
    x += right - left + gap.column;
    height = Math.max(height, top - gap.y);
    start = end;
  }
  return { boxes, width: x - gap.column, height, columns };
}

// Adds the way from box a to box b to `path`: straight down to the next layer, in an arc past others, and
// through the gutters between columns.
function route(path, layout, a, b, gap) {
  const from = { x: a.x + a.w / 2, y: a.y + a.h };
  const to = { x: b.x + b.w / 2, y: b.y };
  if (a.column === b.column && b.layer > a.layer) {
    path.moveTo(from.x, from.y);
    if (b.layer - a.layer === 1) {
      const middle = (from.y + to.y) / 2;
      path.bezierCurveTo(from.x, middle, to.x, middle, to.x, to.y);
    } else {
      const side = Math.max(a.x + a.w, b.x + b.w) + 10 + Math.min(26, 2.5 * (b.layer - a.layer));
      path.moveTo(a.x + a.w, a.y + a.h / 2);
      path.bezierCurveTo(side + 12, a.y + a.h / 2, side + 12, b.y + b.h / 2, b.x + b.w, b.y + b.h / 2);
    }
    return;
  }
  const forward = b.column > a.column;
  const low = from.y + gap.y / 2;
  const high = to.y - gap.y / 2;
  const down = layout.columns[a.column].right + gap.column * 0.4;
  const up = layout.columns[b.column].left - gap.column * 0.4;
  const points = [from, { x: from.x, y: low }, { x: down, y: low }];
  if (forward && b.column - a.column > 1 || !forward) points.push({ x: down, y: -gap.y / 2 }, { x: up, y: -gap.y / 2 });
  points.push({ x: up, y: high }, { x: to.x, y: high }, to);
  if (forward && b.column - a.column === 1) points.splice(3, 1, { x: down, y: high });
  path.moveTo(points[0].x, points[0].y);
  for (let i = 1; i < points.length - 1; i += 1) path.arcTo(points[i].x, points[i].y, points[i + 1].x, points[i + 1].y, 5);
  path.lineTo(to.x, to.y);
}
