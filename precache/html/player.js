"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const $ = id => document.getElementById(id);
const MAX_CELLS = 24, MAX_SLOTS = 48;
const {end, capacity, workers, batches} = data;
const still = matchMedia("(prefers-reduced-motion: reduce)");
const digits = Math.min(6, Math.max(1, 3 - Math.floor(Math.log10(end / 1000))));
const seconds = ms => (ms / 1000).toFixed(digits) + " s";

// --- the state at a time -----------------------------------------------------------------------
const mine = Array.from({length: workers}, () => []);
batches.worker.forEach((worker, batch) => mine[worker].push(batch));
const order = batches.taken.map((_, batch) => batch)
  .filter(batch => batches.taken[batch] <= end)
  .sort((a, b) => batches.taken[a] - batches.taken[b]);
const waits = order.slice(1).map((batch, n) => batches.taken[batch] - batches.done[order[n]]);

function lastUpTo(list, times, t) {
  let low = 0, high = list.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (times[list[middle]] <= t) low = middle + 1; else high = middle;
  }
  return low - 1;
}
function workerAt(worker, t) {
  const batch = mine[worker][lastUpTo(mine[worker], batches.begun, t)];
  const begun = batches.begun[batch], ready = batches.ready[batch];
  return batch === undefined || t >= ready ? {idle: true, share: 0} : {share: (t - begun) / (ready - begun)};
}
function consumerAt(t) {
  const n = lastUpTo(order, batches.taken, t), batch = order[n];
  if (n < 0 || t >= batches.done[batch]) return {n, waiting: true};
  const taken = batches.taken[batch];
  return {n, batch, share: (t - taken) / (batches.done[batch] - taken)};
}
const changes = [0], depths = [0];
for (const [time, change] of [...batches.ready.map(t => [t, 1]), ...order.map(batch => [batches.taken[batch], -1])]
  .filter(([time]) => time <= end).sort((a, b) => a[0] - b[0])) {
  const depth = depths.at(-1) + change;
  if (time > changes.at(-1)) {
    changes.push(time);
    depths.push(depth);
  } else depths[depths.length - 1] = depth;
}
const positions = changes.map((_, n) => n);
const most = depths.reduce((a, b) => Math.max(a, b), 0);
const depthAt = t => depths[lastUpTo(positions, changes, t)];

// --- the stage --------------------------------------------------------------------------------
const cells = Array.from({length: Math.min(workers, MAX_CELLS)}, () => cell($("workers")));
const slots = Array.from({length: Math.min(capacity, MAX_SLOTS)}, () => {
  const slot = document.createElement("div");
  slot.className = "slot";
  $("slots").append(slot);
  return slot;
});
if (workers > MAX_CELLS) $("workers-name").textContent = `Workers, ${MAX_CELLS} of ${workers}`;
$("queue-name").textContent = capacity > MAX_SLOTS ? `Ready, ${MAX_SLOTS} of ${capacity} at most` : `Ready, ${capacity} at most`;
function cell(parent) {
  const box = document.createElement("div");
  box.className = "cell";
  box.append(document.createElement("span"), document.createElement("i"));
  parent.append(box);
  return box;
}
function show(box, kind, text, share) {
  box.className = "cell " + kind;
  box.firstChild.textContent = text;
  box.lastChild.style.width = 100 * share + "%";
}
function drawStage(t) {
  let idle = 0;
  for (let worker = 0; worker < workers; worker++) {
    const state = workerAt(worker, t);
    if (state.idle) idle++;
    if (worker < cells.length)
      show(cells[worker], "", `${worker + 1}: ${state.idle ? "idle" : Math.floor(100 * state.share) + "%"}`, state.share);
  }
  const depth = depthAt(t);
  slots.forEach((slot, n) => {
    slot.classList.toggle("full", n < depth);
    slot.textContent = n < depth ? "●" : "";
  });
  const consumer = consumerAt(t);
  show($("consumer"), consumer.waiting ? "wait" : "work", consumer.waiting ? "waiting" : "working", consumer.waiting ? 1 : consumer.share);
  const done = consumer.n + (consumer.waiting ? 1 : 0);
  return `At ${seconds(t)}: ${workers - idle} of ${workers} ${workers === 1 ? "worker" : "workers"} loading; ${depth} ready; ` +
    `the training loop ${consumer.waiting ? "waits for data" : "works"}; ${done} ${done === 1 ? "batch" : "batches"} done.`;
}

// --- charts -----------------------------------------------------------------------------------
const colour = {};
function readColours() {
  const style = getComputedStyle(document.documentElement);
  for (const name of ["bg", "card", "ink", "soft", "line", "blue", "orange", "green", "bad"])
    colour[name] = style.getPropertyValue("--" + name).trim();
}
function sized(canvas, height) {
  const scale = devicePixelRatio || 1, width = canvas.clientWidth;
  canvas.style.height = height + "px";
  if (canvas.width !== Math.round(width * scale) || canvas.height !== Math.round(height * scale)) {
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
  }
  const pen = canvas.getContext("2d");
  pen.setTransform(scale, 0, 0, scale, 0, 0);
  pen.clearRect(0, 0, width, height);
  pen.font = "12px system-ui, sans-serif";
  pen.textBaseline = "middle";
  return [pen, width];
}
function hatch(pen, name) {
  const tile = document.createElement("canvas");
  tile.width = tile.height = 6;
  const small = tile.getContext("2d");
  small.strokeStyle = colour[name];
  small.lineWidth = 2;
  for (const shift of [-6, 0, 6]) {
    small.beginPath();
    small.moveTo(shift, 6);
    small.lineTo(shift + 6, 0);
    small.stroke();
  }
  return pen.createPattern(tile, "repeat");
}
const GUTTER = 62, RIGHT = 8;
let span = end;
function view(t) {
  const from = Math.min(Math.max(0, t - span / 2), end - span);
  return [from, from + span];
}
function ticks(range, most) {
  const rough = range / most, power = 10 ** Math.floor(Math.log10(rough));
  return power * [1, 2, 5, 10].find(n => n * power >= rough);
}
function timeAxis(pen, width, from, until, bottom) {
  const x = ms => GUTTER + (ms - from) / (until - from) * (width - GUTTER - RIGHT);
  const step = ticks(until - from, Math.max(2, (width - GUTTER) / 80));
  const digits = Math.max(0, -Math.floor(Math.log10(step / 1000) + 1e-9));
  pen.strokeStyle = colour.line;
  pen.fillStyle = colour.soft;
  pen.lineWidth = 1;
  for (let n = Math.ceil(from / step - 1e-9); n * step <= until + 1e-9; n++) {
    const at = x(n * step);
    pen.beginPath();
    pen.moveTo(at, 0);
    pen.lineTo(at, bottom);
    pen.stroke();
    pen.textAlign = at > width - 24 ? "right" : "center";
    pen.fillText((n * step / 1000).toFixed(digits) + " s", Math.min(at, width - 2), bottom + 11);
  }
  pen.textAlign = "right";
  return x;
}
function cursor(pen, at, height) {
  pen.strokeStyle = colour.ink;
  pen.lineWidth = 2;
  pen.beginPath();
  pen.moveTo(at, 0);
  pen.lineTo(at, height);
  pen.stroke();
}
function drawLanes(t) {
  const lanes = Math.min(workers, MAX_CELLS), row = 18, height = (lanes + 1) * row + 8;
  const [pen, width] = sized($("lanes"), height + 22);
  const [from, until] = view(t), x = timeAxis(pen, width, from, until, height);
  const waitFill = hatch(pen, "bad");
  const bar = (a, b, y, fill) => {
    const left = x(Math.max(a, from)), right = x(Math.min(b, until));
    if (b < from || a > until || right <= left) return;
    pen.fillStyle = fill;
    pen.fillRect(left, y + 2, Math.max(.75, right - left - (right - left > 3 ? 1 : 0)), row - 4);
  };
  const name = (text, y) => {
    pen.fillStyle = colour.soft;
    pen.fillText(text, GUTTER - 6, y + row / 2);
  };
  for (let worker = 0; worker < lanes; worker++) {
    const list = mine[worker], y = worker * row;
    name(`worker ${worker + 1}`, y);
    for (let n = Math.max(0, lastUpTo(list, batches.begun, from)); n < list.length && batches.begun[list[n]] <= until; n++) {
      bar(batches.begun[list[n]], Math.min(batches.ready[list[n]], end), y, colour.blue);
    }
  }
  const y = lanes * row + 6;
  name("training", y);
  let free = 0;
  const first = Math.max(0, lastUpTo(order, batches.taken, from) - 1);
  if (first) free = batches.done[order[first - 1]];
  for (let n = first; n < order.length && free <= until; n++) {
    bar(free, batches.taken[order[n]], y, waitFill);
    free = batches.done[order[n]];
    bar(batches.taken[order[n]], Math.min(free, end), y, colour.green);
  }
  if (free < end) bar(free, end, y, waitFill);
  cursor(pen, x(t), height);
}
function drawQueue(t) {
  const height = 90, [pen, width] = sized($("queue"), height + 22);
  const [from, until] = view(t), x = timeAxis(pen, width, from, until, height);
  const top = Math.max(1, 4 * most < capacity ? most : capacity);
  const y = depth => height - 6 - depth / top * (height - 16);
  pen.fillStyle = colour.soft;
  pen.fillText(String(top), GUTTER - 6, y(top));
  pen.fillText("0", GUTTER - 6, y(0));
  pen.fillStyle = colour.blue;
  pen.beginPath();
  let n = Math.max(0, lastUpTo(positions, changes, from));
  pen.moveTo(x(from), y(0));
  pen.lineTo(x(from), y(depths[n]));
  for (n++; n < changes.length && changes[n] <= until; n++) {
    pen.lineTo(x(changes[n]), y(depths[n - 1]));
    pen.lineTo(x(changes[n]), y(depths[n]));
  }
  pen.lineTo(x(until), y(depths[n - 1]));
  pen.lineTo(x(until), y(0));
  pen.fill();
  cursor(pen, x(t), height);
}
function drawWaits(t) {
  const height = 120, [pen, width] = sized($("waits"), height + 22);
  const top = waits.reduce((a, b) => Math.max(a, b), 0), room = width - GUTTER - RIGHT;
  const y = wait => height - 4 - (top ? wait / top : 0) * (height - 14);
  pen.textAlign = "right";
  pen.fillStyle = colour.soft;
  pen.fillText(top >= 10 ? Math.round(top).toLocaleString("en") : top.toPrecision(2).replace(/\.?0+$/, ""), GUTTER - 6, y(top));
  if (top) pen.fillText("0", GUTTER - 6, y(0));
  pen.textAlign = "center";
  if (!top) pen.fillText(waits.length ? "The training loop waited for no batch." : "There is no batch after the first.", width / 2, height / 2);
  pen.strokeStyle = colour.line;
  pen.beginPath();
  pen.moveTo(GUTTER, y(0) + .5);
  pen.lineTo(width - RIGHT, y(0) + .5);
  pen.stroke();
  const step = room / Math.max(1, waits.length), current = consumerAt(t).n + (consumerAt(t).waiting ? 1 : 0);
  waits.forEach((wait, n) => {
    if (!wait) return;
    pen.fillStyle = colour.bad;
    pen.fillRect(GUTTER + n * step, y(wait), Math.max(.75, step > 3 ? step - 1 : step), y(0) - y(wait));
  });
  pen.fillStyle = colour.soft;
  pen.textAlign = "left";
  if (waits.length) pen.fillText("batch 2", GUTTER, height + 11);
  pen.textAlign = "right";
  if (waits.length > 1) pen.fillText(`batch ${waits.length + 1}`, width - RIGHT, height + 11);
  if (current > 0 && current <= waits.length) cursor(pen, GUTTER + (current - .5) * step, height);
}

// --- playing ----------------------------------------------------------------------------------
const at = $("at");
let now = 0, playing = false, before = 0;
function draw() {
  const text = drawStage(now);
  $("now").textContent = text;
  $("clock").textContent = `${seconds(now)} of ${seconds(end)}`;
  at.value = now;
  at.setAttribute("aria-valuetext", text);
  drawLanes(now);
  drawQueue(now);
  drawWaits(now);
}
function go(t) {
  now = Math.min(Math.max(0, t), end);
  draw();
}
const moments = order.map(batch => batches.taken[batch]);
const nextMoment = () => moments.find(moment => moment > now + 1e-6) ?? end;
const lastMoment = () => moments.findLast(moment => moment < now - 1e-6) ?? 0;
function play(on) {
  playing = on;
  $("play").textContent = on ? "Pause" : "Play";
  $("now").setAttribute("aria-live", on ? "off" : "polite");
  if (!on) return;
  if (now >= end) go(0);
  before = performance.now();
  requestAnimationFrame(tick);
}
function tick(time) {
  if (!playing) return;
  const past = time - before, speed = Number($("speed").value);
  // With reduced motion, jump from batch to batch.
  if (!still.matches) {
    before = time;
    go(now + Math.max(0, past) * speed);
  } else if (past >= 800) {
    before = time;
    go(nextMoment());
  }
  if (now >= end) play(false); else requestAnimationFrame(tick);
}
function option(select, value, text, chosen) {
  select.add(new Option(text, value, chosen, chosen));
}
const speeds = [.01, .05, .25, 1, 4, 20, 100, 1000];
const fitting = speeds.find(speed => end / speed <= 60000) ?? 1000;
for (const speed of speeds) option($("speed"), speed, `${speed} ×`, speed === fitting);
const preferred = Math.max(5 * data.load, 20 * data.step);
const spans = [.1, .3, 1, 3, 10, 30, 100, 300, 1000].map(s => 1000 * s).filter(ms => ms < end && ms >= end / 3000);
const initial = spans.find(ms => ms >= preferred) ?? end;
for (const ms of spans) option($("zoom"), ms, `${ms / 1000} s`, ms === initial);
option($("zoom"), end, `all ${seconds(end)}`, initial === end);
span = initial;
at.max = end;
at.step = "any";
const step = Math.max(end / 1000, Math.min(data.step / 4, end / 100));
at.addEventListener("keydown", event => {
  const sign = {ArrowRight: 1, ArrowUp: 1, ArrowLeft: -1, ArrowDown: -1, PageUp: 20, PageDown: -20}[event.key];
  if (sign) {
    event.preventDefault();
    go(now + sign * step);
  }
});
at.addEventListener("input", () => go(Number(at.value)));
$("play").addEventListener("click", () => play(!playing));
$("next").addEventListener("click", () => go(nextMoment()));
$("back").addEventListener("click", () => go(lastMoment()));
$("zoom").addEventListener("change", () => { span = Number($("zoom").value); draw(); });
for (const id of ["lanes", "queue"]) $(id)?.addEventListener("click", event => {
  const [from, until] = view(now), width = $(id).clientWidth - GUTTER - RIGHT;
  go(from + (event.offsetX - GUTTER) / width * (until - from));
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { readColours(); draw(); });
new ResizeObserver(draw).observe(document.body);
readColours();
draw();
