"use strict";
(() => {
  const box = document.getElementById("lanes");
  if (!box) return;
  const packed = JSON.parse(document.getElementById("lanes-data").textContent);
  const canvas = box.querySelector("canvas");
  const extent = box.querySelector(".extent");
  const tip = document.getElementById("tip");
  const said = document.getElementById("said");
  const context = canvas.getContext("2d");
  const RULER = 40, MARGIN = 6, STEP_US = 5;

  // Slices of a lane as columns. `deep`: nesting depth; `longest`: longest slice, to find those in view.
  const lanes = packed.lanes.map(([label, row, steps]) => {
    const count = row.length / 3;
    const lane = { label, name: new Uint32Array(count), start: new Float64Array(count), end: new Float64Array(count),
      step: new Int32Array(count), deep: new Uint8Array(count), depth: 1, longest: 0, top: 0, height: 0 };
    const open = [];
    let at = 0;
    for (let i = 0, pair = 0, left = steps[1]; i < count; i++, left--) {
      if (!left) { pair += 2; left = steps[pair + 1]; }
      at += row[3 * i + 1];
      lane.name[i] = row[3 * i];
      lane.start[i] = at;
      lane.end[i] = at + row[3 * i + 2];
      lane.step[i] = steps[pair];
      while (open.length && open[open.length - 1] <= at) open.pop();
      lane.deep[i] = Math.min(open.length, 3);
      open.push(lane.end[i]);
      lane.depth = Math.max(lane.depth, lane.deep[i] + 1);
      lane.longest = Math.max(lane.longest, row[3 * i + 2]);
    }
    return lane;
  });
  const many = lanes.length > 12;
  const ROW = many ? 9 : 17;
  let below = RULER;
  for (const lane of lanes) {
    lane.top = below;
    lane.height = Math.max(lane.depth * ROW + (many ? 4 : 9), 15);
    below += lane.height;
  }
  const total = Math.max(packed.end, STEP_US);
  const begins = new Map();  // of steps, on the first lane; step 0 is no step
  lanes[0]?.step.forEach((step, i) => { if (step && !begins.has(step)) begins.set(step, lanes[0].start[i]); });
  const view = { from: 0, to: total, lane: -1, slice: -1 };
  let colours = {}, labels = 0, pending = false, hover = null;

  const readColours = () => {
    const style = getComputedStyle(document.documentElement);
    const of = (name) => style.getPropertyValue(name).trim();
    const hues = packed.names.map(([, hue]) => of(hue === "late" ? "--late-hue" : `--${hue}`));
    const ink = hues.map((hex) => {
      const [r, g, b] = [1, 3, 5].map((i) => (parseInt(hex.slice(i, i + 2), 16) / 255) ** 2.2);
      return 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.179 ? "#10151a" : "#ffffff";
    });
    const tile = document.createElement("canvas");
    tile.width = tile.height = 6;
    const brush = tile.getContext("2d");
    const hatched = (hex) => {  // late ranks differ without colours, too
      brush.fillStyle = hex;
      brush.fillRect(0, 0, 6, 6);
      brush.strokeStyle = of("--stripe");
      brush.lineWidth = 2;
      for (const at of [-6, 0, 6]) { brush.beginPath(); brush.moveTo(at, 6); brush.lineTo(at + 6, 0); brush.stroke(); }
      return context.createPattern(tile, "repeat");
    };
    packed.names.forEach(([, hue], i) => { if (hue === "late") hues[i] = hatched(hues[i]); });
    colours = { hues, ink, text: of("--text"), soft: of("--soft"), line: of("--line"), panel: of("--panel"), ring: of("--ring"), font: getComputedStyle(document.body).fontFamily };
  };

  // The first slice that may overlap `us`, by bisection.
  const first = (lane, us) => {
    let low = 0, high = lane.start.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (lane.start[middle] < us - lane.longest) low = middle + 1; else high = middle;
    }
    return low;
  };
  const width = () => canvas.clientWidth - labels - MARGIN;
  const x = (us) => labels + ((us - view.from) / (view.to - view.from)) * width();
  const us = (px) => view.from + ((px - labels) / width()) * (view.to - view.from);
  const ms = (value) => (value / 1000).toLocaleString("en", { maximumFractionDigits: value < 10000 ? 3 : 1 });

  const rulerEvery = () => {
    const wanted = (view.to - view.from) / Math.max(2, width() / 110);
    const power = 10 ** Math.floor(Math.log10(wanted));
    return [1, 2, 5, 10].map((n) => n * power).find((n) => n >= wanted);
  };
  const drawRuler = (height) => {
    const every = rulerEvery();
    context.fillStyle = colours.panel;
    context.fillRect(0, 0, canvas.clientWidth, RULER);
    context.textAlign = "left";
    let free = 0;  // the first pixel without a step number
    for (const [step, at] of begins) {
      const px = Math.round(x(at)) + 0.5, text = `step ${step}`;
      if (at < view.from || at > view.to) continue;
      context.globalAlpha = 0.35;
      context.strokeStyle = colours.text;
      context.beginPath(); context.moveTo(px, RULER); context.lineTo(px, height); context.stroke();
      context.globalAlpha = 1;
      if (px < free || px + context.measureText(text).width > canvas.clientWidth) continue;
      context.fillStyle = colours.text;
      context.fillText(text, px, 33);
      free = px + context.measureText(text).width + 8;
    }
    for (let at = Math.ceil(view.from / every) * every; at <= view.to; at += every) {
      const px = Math.round(x(at)) + 0.5;
      context.strokeStyle = colours.line;
      context.beginPath(); context.moveTo(px, 4); context.lineTo(px, 17); context.stroke();
      context.fillStyle = colours.soft;
      const text = `${ms(at)} ms`;
      if (px + 4 + context.measureText(text).width < canvas.clientWidth) context.fillText(text, px + 3, 12);
    }
    context.strokeStyle = colours.line;
    context.beginPath(); context.moveTo(0, RULER - 0.5); context.lineTo(canvas.clientWidth, RULER - 0.5); context.stroke();
  };
  const drawLane = (lane, number, offset) => {
    const top = lane.top - offset, chosen = number === view.lane;
    const count = lane.start.length, right = labels + width();
    const reached = [-1, -1, -1, -1];  // last pixel drawn at each depth: slices within it are skipped
    for (let i = first(lane, view.from); i < count && lane.start[i] < view.to; i++) {
      if (lane.end[i] < view.from) continue;
      const deep = lane.deep[i];
      const left = Math.max(x(lane.start[i]), labels), until = Math.min(x(lane.end[i]), right);
      if (until <= reached[deep] + 0.3) continue;
      reached[deep] = Math.max(until, left + 0.7);
      const y = top + (many ? 2 : 4) + deep * ROW;
      context.fillStyle = colours.hues[lane.name[i]];
      context.fillRect(left, y, Math.max(until - left - (until - left > 3 ? 0.7 : 0), 0.7), ROW - 1);
      if (!many && until - left > 28) {
        const text = packed.names[lane.name[i]][0];
        if (context.measureText(text).width < until - left - 8) {
          context.fillStyle = colours.ink[lane.name[i]];
          context.fillText(text, left + 4, y + ROW - 5.5);
        }
      }
      if (chosen && i === view.slice) {
        context.strokeStyle = colours.text; context.lineWidth = 2;
        context.strokeRect(left + 1, y, Math.max(until - left - 2, 2), ROW - 1);
        context.lineWidth = 1;
      }
    }
    context.fillStyle = chosen ? colours.ring : colours.soft;
    if (chosen) context.fillRect(0, top + 1, 3, lane.height - 2);
    context.fillText(fit(lane.label, labels - 16), 8, top + lane.height / 2 + 4);
    context.strokeStyle = colours.line;
    context.beginPath(); context.moveTo(0, top + lane.height - 0.5); context.lineTo(canvas.clientWidth, top + lane.height - 0.5); context.stroke();
  };
  const fit = (text, room) => {
    if (context.measureText(text).width <= room) return text;
    let cut = text.slice(0, 80);
    while (cut && context.measureText(`${cut}\u2026`).width > room) cut = cut.slice(0, -1);
    return `${cut}\u2026`;
  };
  const draw = () => {
    pending = false;
    const ratio = devicePixelRatio || 1, wide = box.clientWidth;
    const high = Math.min(below, parseFloat(getComputedStyle(box).maxHeight) || below);  // no maximum on paper
    if (canvas.width !== Math.round(wide * ratio) || canvas.height !== Math.round(high * ratio)) {
      canvas.width = Math.round(wide * ratio);
      canvas.height = Math.round(high * ratio);
      canvas.style.height = `${high}px`;
      extent.style.height = `${Math.max(0, below - high)}px`;
    }
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, wide, high);
    context.font = `12px ${colours.font}`;
    const longest = Math.max(...lanes.slice(0, 300).map((lane) => context.measureText(lane.label.slice(0, 80)).width));
    labels = Math.min(longest + 24, wide < 500 ? 92 : 220);
    const offset = box.scrollTop;
    lanes.forEach((lane, number) => {
      if (lane.top + lane.height > offset + RULER && lane.top < offset + high) drawLane(lane, number, offset);
    });
    drawRuler(high);
    box.dataset.view = `${Math.round(view.from)} ${Math.round(view.to)}`;
  };
  const soon = () => { if (!pending) { pending = true; requestAnimationFrame(draw); } };

  const set = (from, to) => {
    const span = Math.min(Math.max(to - from, STEP_US), total);
    view.from = Math.min(Math.max(from, 0), total - span);
    view.to = view.from + span;
    soon();
  };
  const zoom = (factor, at = (view.from + view.to) / 2) => set(at - (at - view.from) * factor, at + (view.to - at) * factor);
  const move = (share) => { const by = (view.to - view.from) * share; set(view.from + by, view.to + by); };

  const describe = (lane, i) => `${packed.names[lane.name[i]][0]}\n${ms(lane.end[i] - lane.start[i])} ms${lane.step[i] ? `, step ${lane.step[i]}` : ""}\n${lane.label}`;
  const showTip = (lane, i, px, py) => {
    tip.textContent = describe(lane, i);
    tip.hidden = false;
    tip.style.left = `${Math.max(4, Math.min(px + 14, innerWidth - tip.offsetWidth - 8))}px`;
    tip.style.top = `${py + 18 + tip.offsetHeight > innerHeight ? py - tip.offsetHeight - 10 : py + 18}px`;
  };
  const hide = () => { tip.hidden = true; hover = null; };
  const find = (px, py) => {
    const y = py + box.scrollTop;
    const lane = lanes.find((one) => y >= one.top && y < one.top + one.height);
    if (!lane || px < labels || py < RULER) return null;
    const at = us(px), near = (view.to - view.from) / width();
    const deep = Math.floor((y - lane.top - (many ? 2 : 4)) / ROW);
    for (let i = first(lane, at - near); i < lane.start.length && lane.start[i] <= at + near; i++) {
      if (lane.deep[i] === deep && lane.end[i] >= at - near) return [lane, i];
    }
    return null;
  };
  const choose = (number, slice) => {
    view.lane = Math.min(Math.max(number, 0), lanes.length - 1);
    view.slice = slice;
    const lane = lanes[view.lane];
    if (lane.top - RULER < box.scrollTop) box.scrollTop = lane.top - RULER;
    if (lane.top + lane.height > box.scrollTop + box.clientHeight) box.scrollTop = lane.top + lane.height - box.clientHeight;
    if (slice < 0) { said.textContent = lane.label; hide(); soon(); return; }
    const span = view.to - view.from;
    if (lane.end[slice] < view.from || lane.start[slice] > view.to) set(lane.start[slice] - span / 4, lane.start[slice] + (3 * span) / 4);
    said.textContent = describe(lane, slice);
    const edge = canvas.getBoundingClientRect();
    showTip(lane, slice, edge.left + Math.max(labels, x(lane.start[slice])), edge.top + lane.top - box.scrollTop + lane.height);
    soon();
  };
  const along = (by) => {
    const number = Math.max(view.lane, 0), lane = lanes[number], count = lane.start.length;
    const next = view.slice < 0 ? first(lane, view.from + lane.longest) : view.slice + by;
    if (count) choose(number, Math.min(Math.max(next, 0), count - 1));
  };

  const press = (key) => {
    if (key === "ArrowLeft") move(-0.2);
    else if (key === "ArrowRight") move(0.2);
    else if (key === "+" || key === "=") zoom(0.6);
    else if (key === "-" || key === "_") zoom(1 / 0.6);
    else if (key === "0" || key === "Home") set(0, total);
    else if (key === "ArrowUp") choose(view.lane - 1, -1);
    else if (key === "ArrowDown") choose(view.lane + 1, -1);
    else if (key === ".") along(1);
    else if (key === ",") along(-1);
    else if (key === "Escape") hide();
    else return false;
    return true;
  };
  box.addEventListener("keydown", (event) => {
    if (!event.ctrlKey && !event.metaKey && !event.altKey && press(event.key)) event.preventDefault();
  });
  box.addEventListener("blur", hide);
  for (const button of document.querySelectorAll(".buttons [data-key]")) button.addEventListener("click", () => press(button.dataset.key));

  box.addEventListener("wheel", (event) => {
    const sideways = Math.abs(event.deltaX) > Math.abs(event.deltaY) || event.shiftKey;
    if (sideways) { event.preventDefault(); move((event.deltaX || event.deltaY) / width()); return; }
    if (!event.ctrlKey && document.activeElement !== box) return;
    event.preventDefault();
    zoom(Math.exp(Math.max(-300, Math.min(300, event.deltaY)) * 0.0025), us(event.clientX - canvas.getBoundingClientRect().left));
  }, { passive: false });

  let grip = null;
  box.addEventListener("pointerdown", (event) => {
    if (event.button !== 0 || event.offsetX > box.clientWidth) return;
    grip = { px: event.clientX, from: view.from, to: view.to, id: event.pointerId };
    hide();
  });
  box.addEventListener("pointermove", (event) => {
    const edge = canvas.getBoundingClientRect();
    if (grip) {
      if (!box.classList.contains("moving")) { box.classList.add("moving"); box.setPointerCapture(grip.id); }
      const by = ((grip.px - event.clientX) / width()) * (grip.to - grip.from);
      set(grip.from + by, grip.to + by);
      return;
    }
    const found = find(event.clientX - edge.left, event.clientY - edge.top);
    if (found) { hover = found; showTip(...found, event.clientX, event.clientY); } else if (hover) hide();
  });
  const release = () => { grip = null; box.classList.remove("moving"); };
  box.addEventListener("pointerup", release);
  box.addEventListener("pointercancel", release);
  box.addEventListener("pointerleave", hide);
  box.addEventListener("scroll", soon);

  // Steps of the plot over the run.
  const show = (step) => {
    const near = [...begins.keys()].reduce((a, b) => (Math.abs(b - step) < Math.abs(a - step) ? b : a));
    const at = begins.get(near), span = total / Math.max(1, begins.size);
    set(at - span / 2, at + 2 * span);
    said.textContent = `step ${near}`;
    box.scrollIntoView({ block: "center" });
    box.focus({ preventScroll: true });
  };
  if (begins.size) {
    for (const place of document.querySelectorAll(".over-time .place")) place.addEventListener("click", () => show(Number(place.dataset.step)));
    for (const button of document.querySelectorAll(".to-step")) {
      button.hidden = false;
      button.nextElementSibling.hidden = true;
      button.addEventListener("click", () => show(Number(button.dataset.step)));
    }
  }

  for (const button of document.querySelectorAll(".to-lane")) {
    const number = lanes.findIndex((lane) => new RegExp(`^rank ${button.dataset.rank}\\b`).test(lane.label));
    if (number < 0) continue;
    button.hidden = false;
    button.addEventListener("click", () => {
      box.scrollIntoView({ block: "center" });
      box.focus({ preventScroll: true });
      choose(number, -1);
    });
  }

  document.addEventListener("colours", () => { readColours(); soon(); });
  matchMedia("print").addEventListener("change", () => { readColours(); draw(); });  // printing waits for no frame
  new ResizeObserver(soon).observe(box);
  readColours();
  draw();
})();
