// Elements and numbers. Text only ever becomes text: nothing here or elsewhere parses markup.
const $ = (id) => document.getElementById(id);

// Children may be nested lists, and absent.
const present = (children) => children.flat(Infinity).filter((child) => child !== null && child !== undefined);

function el(tag, attributes, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name.startsWith('on')) made.addEventListener(name.slice(2), value);
    else if (name === 'color') made.style.setProperty('--own', value);
    else if (value !== undefined && value !== null && value !== false) made.setAttribute(name, value === true ? '' : value);
  }
  made.append(...present(children));
  return made;
}

function svg(tag, attributes, ...children) {
  const made = document.createElementNS('http://www.w3.org/2000/svg', tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name.startsWith('on')) made.addEventListener(name.slice(2), value);
    else if (name === 'color') made.style.setProperty('--own', value);
    else made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

const sum = (values) => values.reduce((a, b) => a + b, 0);
const geomean = (values) => Math.exp(sum(values.map(Math.log)) / values.length);

function milliseconds(ms) {
  if (ms >= 1000) return (ms / 1000).toFixed(2) + ' s';
  return (ms >= 100 ? ms.toFixed(0) : ms >= 10 ? ms.toFixed(1) : ms >= 0.1 ? ms.toFixed(2) : ms.toFixed(4)) + ' ms';
}
const seconds = (s) => (s >= 100 ? s.toFixed(0) : s >= 10 ? s.toFixed(1) : s.toFixed(2)) + ' s';
const times = (ratio) => (ratio >= 100 ? ratio.toFixed(0) : ratio >= 10 ? ratio.toFixed(1) : ratio.toFixed(2)) + '×';
const error = (value) => (value === null || value === undefined ? 'not known' : value === 0 ? '0' : value.toExponential(1));
const count = (n, one, many) => n.toLocaleString('en') + ' ' + (n === 1 ? one : many || one + 's');
const shapes = (list) => list.map((shape) => shape.join('×') || '()').join('  ');

// One tip for everything that is pointed at.
function showTip(event, lines) {
  const tip = $('tip');
  tip.replaceChildren(...lines.map((line, i) => el('p', i ? {} : { class: 'strong' }, line)));
  tip.hidden = false;
  const { width, height } = tip.getBoundingClientRect();
  const left = Math.min(event.clientX + 14, innerWidth - width - 8);
  const below = event.clientY + 16;
  tip.style.left = Math.max(8, left) + 'px';
  tip.style.top = Math.max(8, below + height > innerHeight - 8 ? event.clientY - height - 12 : below) + 'px';
}
const hideTip = () => { $('tip').hidden = true; };
const tips = (lines) => ({ onpointermove: (event) => showTip(event, lines), onpointerleave: hideTip });
