"use strict";
// Draws what a report has for a canvas: the lane of each rank over time, and the links between many nodes.

const bytesOf = async (text) => {
  const packed = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
};
const dataOf = (id) => {
  const found = document.getElementById(id);
  return found && JSON.parse(found.textContent);
};
const colorOf = (name) => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
const clock = (seconds) => {
  const s = Math.floor(seconds), two = (n) => String(n).padStart(2, "0");
  const h = Math.floor(s / 3600), m = Math.floor(s / 60) % 60;
  return h ? `${h}:${two(m)}:${two(s % 60)}` : `${m}:${two(s % 60)}`;
};
const sized = (canvas, width, height) => {
  const ratio = window.devicePixelRatio || 1;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  canvas.style.height = height + "px";
  const pen = canvas.getContext("2d");
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  return pen;
};

// A fill of its own for each state, so that none is told by its color alone.
const hatches = {
  blocked: [[0, 6, 6, 0], [-1, 1, 1, -1], [5, 7, 7, 5]],
  data: [[0, 2, 6, 2], [0, 5, 6, 5]],
  eval: [[0, 0, 6, 6]],
  save: [[1, 0, 1, 6], [4, 0, 4, 6]],
  stopped: [[0, 0, 6, 6], [0, 6, 6, 0]],
};
const fillOf = (pen, name) => {
  const color = colorOf(name);
  if (!hatches[name]) return color;
  const tile = document.createElement("canvas");
  tile.width = tile.height = 6;
  const small = tile.getContext("2d");
  small.fillStyle = color;
  small.fillRect(0, 0, 6, 6);
  small.strokeStyle = colorOf("ink");
  for (const [x0, y0, x1, y1] of hatches[name]) {
    small.beginPath();
    small.moveTo(x0, y0);
    small.lineTo(x1, y1);
    small.stroke();
  }
  return pen.createPattern(tile, "repeat");
};

const drawLanes = async () => {
  const told = dataOf("lanes-data");
  if (!told) return;
  const canvas = document.getElementById("lanes-canvas"), fold = document.getElementById("fold");
  const read = document.getElementById("lanes-read"), cells = await bytesOf(told.data), count = told.columns;
  const names = { none: "nothing known", blocked: "blocked in a collective", gone: "ended" };
  const words = told.states.map((state) => names[state] || state), none = 0;
  const single = told.rows.map(([rank, node], i) => ({ name: `rank ${rank}`, node, of: [i] }));
  const byNode = new Map();
  single.forEach((row, i) => byNode.set(row.node, [...(byNode.get(row.node) || []), i]));
  const folded = [...byNode].map(([node, of]) => ({ name: node, node: "", of }));
  fold.checked = single.length > 64 && folded.length < single.length;
  fold.disabled = folded.length === single.length;
  const worst = (row, from, to) => {
    let state = none;
    for (const i of row.of) for (let c = from; c < to; c++) state = Math.max(state, cells[i * count + c]);
    return state;
  };
  const at = { row: 0, column: 0, isShown: false };
  let rows, box;

  const paint = () => {
    rows = fold.checked ? folded : single;
    const height = Math.max(3, Math.min(22, Math.floor(640 / rows.length)));
    const gap = height > 6 ? 2 : height > 4 ? 1 : 0, top = told.marks.length ? 18 : 2;
    const width = canvas.clientWidth || 800;
    const pen = sized(canvas, width, top + rows.length * height + 22);
    pen.font = "12px system-ui, sans-serif";
    const label = (row) => (row.node && height > 14 ? `${row.name} · ${row.node}` : row.name);
    const left = Math.min(width / 4, 12 + Math.max(...rows.slice(0, 400).map((row) => pen.measureText(label(row)).width)));
    box = { left, top, height, width: width - left - 10 };
    const fills = told.states.map((state) => fillOf(pen, state)), every = Math.ceil(14 / height);
    pen.textBaseline = "middle";
    rows.forEach((row, r) => {
      const y = top + r * height;
      pen.fillStyle = colorOf("soft");
      if (r % every === 0) pen.fillText(label(row), 0, y + height / 2, left - 6);
      const wide = Math.max(1, Math.floor(box.width));
      let since = 0, state = null;
      for (let x = 0; x <= wide; x++) {
        const from = Math.floor((x * count) / wide), to = Math.max(from + 1, Math.floor(((x + 1) * count) / wide));
        const now = x < wide ? worst(row, from, to) : null;
        if (now === state) continue;
        if (state) {
          pen.fillStyle = fills[state];
          pen.fillRect(left + since, y, x - since, height - gap);
        }
        since = x;
        state = now;
      }
    });
    const length = count * told.column_s, bottom = top + rows.length * height;
    const step = [1, 2, 5, 10, 30, 60, 300, 600, 1800, 3600, 7200, 14400, 43200, 86400, 604800].find((s) => length / s <= box.width / 90) || length;
    pen.fillStyle = pen.strokeStyle = colorOf("soft");
    for (let t = 0; t <= length; t += step) {
      const x = left + (t / length) * box.width, text = clock(t), room = pen.measureText(text).width;
      pen.fillRect(x, bottom, 1, 4);
      pen.fillText(text, Math.min(Math.max(x - room / 2, left), width - room), bottom + 13);
    }
    let free = 0;
    for (const [t, text] of told.marks) {
      const x = left + (t / length) * box.width, room = pen.measureText(`▼ ${text}`).width;
      pen.fillStyle = colorOf("text");
      pen.fillRect(x, top - 4, 1.5, bottom - top + 4);
      const begin = Math.min(x - 4, width - room);
      if (begin >= free) {
        pen.fillText(`▼ ${text}`, begin, 8);
        free = begin + room + 8;
      }
    }
    if (at.isShown) {
      const x = left + ((at.column + 0.5) / count) * box.width;
      pen.strokeStyle = colorOf("text");
      pen.strokeRect(left - 1, top + at.row * height - 1, box.width + 2, height - gap + 2);
      pen.fillStyle = colorOf("text");
      pen.fillRect(x, top, 1, bottom - top);
    }
  };
  const say = () => {
    const row = rows[at.row], state = worst(row, at.column, at.column + 1);
    read.textContent = `${row.name}${row.node ? ` on ${row.node}` : ""}, ${clock(at.column * told.column_s)}: ${words[state]}`;
  };
  const move = (row, column) => {
    at.row = Math.max(0, Math.min(rows.length - 1, row));
    at.column = Math.max(0, Math.min(count - 1, column));
    at.isShown = true;
    paint();
    say();
  };
  canvas.addEventListener("mousemove", (event) => {
    const column = Math.floor(((event.offsetX - box.left) / box.width) * count);
    if (column >= 0) move(Math.floor((event.offsetY - box.top) / box.height), column);
  });
  canvas.addEventListener("keydown", (event) => {
    const far = event.shiftKey ? Math.ceil(count / 20) : 1;
    const steps = { ArrowLeft: [0, -far], ArrowRight: [0, far], ArrowUp: [-1, 0], ArrowDown: [1, 0], Home: [0, -count], End: [0, count] };
    if (!steps[event.key]) return;
    event.preventDefault();
    move(at.row + steps[event.key][0], at.column + steps[event.key][1]);
  });
  canvas.addEventListener("blur", () => { at.isShown = false; paint(); });
  fold.addEventListener("change", () => { at.row = 0; at.isShown = false; paint(); });
  return paint;
};

const drawHeat = async () => {
  const told = dataOf("heat-data");
  if (!told) return;
  const canvas = document.getElementById("heat-canvas"), read = document.getElementById("heat-read");
  const cells = await bytesOf(told.data), count = told.nodes.length;
  const words = ["half the median or less", "shorter than the median", "about the median", "1.2 to 1.7 times the median",
    "1.7 to 2.4 times the median", "2.4 to 3.4 times the median", "3.4 to 5.7 times the median", "over 5.7 times the median"];
  const at = { row: 0, column: 0 };
  let side = 1;
  const paint = () => {
    side = Math.max(1, Math.min(12, Math.floor(Math.min(canvas.parentElement.clientWidth - 40, 640) / count)));
    canvas.style.width = side * count + "px";
    const pen = sized(canvas, side * count, side * count), hot = colorOf("hot");
    const gap = side > 4 ? 1 : 0;
    for (let r = 0; r < count; r++) for (let c = 0; c < count; c++) {
      const level = cells[r * count + c];
      if (level === 255) continue;
      pen.fillStyle = level === 254 ? colorOf("bad") : level < 4 ? colorOf("transfer") : `rgba(${hot}, ${0.4 + 0.2 * (level - 4)})`;
      pen.fillRect(c * side, r * side, side - gap, side - gap);
      if (level === 254 && side > 4) {
        pen.strokeStyle = colorOf("bg");
        pen.beginPath();
        pen.moveTo(c * side, r * side);
        pen.lineTo((c + 1) * side - gap, (r + 1) * side - gap);
        pen.stroke();
      }
    }
  };
  const move = (row, column) => {
    at.row = Math.max(0, Math.min(count - 1, row));
    at.column = Math.max(0, Math.min(count - 1, column));
    const level = cells[at.row * count + at.column];
    const what = level === 255 ? "not tried" : level === 254 ? "does not work" : words[level];
    read.textContent = `${told.nodes[at.row]} to ${told.nodes[at.column]}: ${what}`;
  };
  canvas.addEventListener("mousemove", (event) => move(Math.floor(event.offsetY / side), Math.floor(event.offsetX / side)));
  canvas.addEventListener("keydown", (event) => {
    const steps = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
    if (!steps[event.key]) return;
    event.preventDefault();
    move(at.row + steps[event.key][0], at.column + steps[event.key][1]);
  });
  return paint;
};

Promise.all([drawLanes(), drawHeat()]).then((painters) => {
  const paint = () => painters.forEach((painter) => painter && painter());
  paint();
  let soon = 0;
  window.addEventListener("resize", () => { cancelAnimationFrame(soon); soon = requestAnimationFrame(paint); });
  for (const query of ["(prefers-color-scheme: dark)", "print"]) window.matchMedia(query).addEventListener("change", paint);
  window.addEventListener("beforeprint", () => document.querySelectorAll("details").forEach((found) => { found.open = true; }));
  document.documentElement.dataset.drawn = "yes";
});
