"use strict";
// Draws timelines on one canvas: only rows and events in view, at most one box a pixel column. See viewer.py for the data.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const canvas = document.getElementById("view");
  const ctx = canvas.getContext("2d");
  const tip = document.getElementById("tip");
  const LEFT = 84, RIGHT = 16, AXIS = 26, HEAD = 26, GAP = 5;
  const SI = data.units === "si";
  const LINES = ["#5b6472", "#c2410c", "#7c3aed", "#0f766e"];
  const otherLanes = data.lanes.slice(1).map((l) => l.name);
  const total = Math.max(...data.timelines.map((t) => t.length), 1e-30);
  const maxRanks = Math.max(...data.timelines.map((t) => t.ranks));
  const peak = Math.max(0, ...data.timelines.flatMap((t) => t.memory.map((m) => m.peak)));
  const view = { t0: 0, t1: total, y: 0, grouped: false, hover: null };
  let width = 0, height = 0, rows = [], tall = 0, pending = false;

  // ---- rows -------------------------------------------------------------------------------------------------------
  const byRow = data.timelines.map((t) => {
    const lists = Array.from({ length: t.ranks }, () => ({ compute: [], other: [] }));
    for (let i = 0; i < t.rank.length; i++) {
      const list = lists[t.rank[i]];
      (data.kinds[t.kind[i]].lane === "compute" ? list.compute : list.other).push(i);
    }
    for (const list of lists) {
      // longest event of the row: how far back a search must begin to see events that reach into view
      for (const lane of ["compute", "other"])
        list[lane + "Longest"] = list[lane].reduce((m, i) => Math.max(m, t.end[i] - t.start[i]), 0);
    }
    return lists;
  });

  function layoutRows() {
    const base = maxRanks <= 8 ? 34 : maxRanks <= 20 ? 26 : 20;
    const row = base + otherLanes.length * 6, mem = maxRanks <= 8 ? 44 : maxRanks <= 20 ? 30 : 22;
    rows = [];
    let y = 0;
    const add = (kind, h, extra) => { rows.push({ kind, y, h, ...extra }); y += h; };
    const memoryRow = (r) => { if (peak > 0) add("memory", mem, { rank: r, tag: view.grouped ? "memory" : "" }); };
    const name = (t) => `${t.name}, ${t.source}`;
    if (view.grouped) {
      for (const t of data.timelines) add("head", HEAD, { text: `${name(t)} — ${t.summary}` });
      for (let r = 0; r < maxRanks; r++) {
        data.timelines.forEach((t, k) => { if (r < t.ranks) add("rank", row, { rank: r, k, tag: t.source }); });
        memoryRow(r);
      }
    } else {
      data.timelines.forEach((t, k) => {
        add("head", HEAD, { text: `${name(t)} — ${t.summary}` });
        for (let r = 0; r < t.ranks; r++) add("rank", row, { rank: r, k });
      });
      if (peak > 0) {
        const how = data.timelines.length > 1 ? ` (${data.timelines[0].source} filled, then as lines)` : "";
        add("head", HEAD, { text: `${SI ? "live memory" : "live activations"} per rank${how}; full row height ${showMemory(peak)}` });
        for (let r = 0; r < maxRanks; r++) memoryRow(r);
      }
    }
    tall = y + 8;
  }

  // ---- units ------------------------------------------------------------------------------------------------------
  const digits = (x, n = 4) => {
    const s = Math.abs(x) >= 1000 ? x.toFixed(0) : Number(x.toPrecision(n)).toString();
    return s;
  };
  function showTime(x) {
    if (!SI) return digits(x, 6);
    if (x === 0) return "0 s";
    const a = Math.abs(x);
    return a < 1e-3 ? `${digits(x * 1e6)} µs` : a < 1 ? `${digits(x * 1e3)} ms` : `${digits(x)} s`;
  }
  function showMemory(x) {
    if (!SI) return `${digits(x)}`;
    const a = Math.abs(x);
    return a < 1e3 ? `${digits(x)} B` : a < 1e6 ? `${digits(x / 1e3)} kB` : a < 1e9 ? `${digits(x / 1e6)} MB` : `${digits(x / 1e9)} GB`;
  }
  const [axisFactor, axisUnit] = !SI ? [1, ""] : total < 1e-3 ? [1e6, "µs"] : total < 1 ? [1e3, "ms"] : [1, "s"];
  const axisName = SI ? `time (${axisUnit})` : "time (units of cost)";

  // ---- drawing ----------------------------------------------------------------------------------------------------
  const plotWidth = () => width - LEFT - RIGHT;
  const xOf = (t) => LEFT + ((t - view.t0) / (view.t1 - view.t0)) * plotWidth();
  const tOf = (x) => view.t0 + ((x - LEFT) / plotWidth()) * (view.t1 - view.t0);

  function firstIndex(list, column, t) {  // first position in list whose column value is >= t
    let lo = 0, hi = list.length;
    while (lo < hi) { const mid = (lo + hi) >> 1; if (column[list[mid]] < t) lo = mid + 1; else hi = mid; }
    return lo;
  }

  function bandOf(row, lane) {  // [top, height] of a lane within a rank row
    const inner = row.h - GAP;
    if (lane === "compute") return [row.y + GAP / 2, inner - otherLanes.length * 6];
    return [row.y + GAP / 2 + inner - (otherLanes.length - otherLanes.indexOf(lane)) * 6 + 1, 5];
  }

  function drawRank(row) {
    const t = data.timelines[row.k], lists = byRow[row.k][row.rank];
    const [top, h] = bandOf(row, "compute");
    ctx.fillStyle = "#eef0f3";
    const x0 = Math.max(LEFT, xOf(0)), x1 = Math.min(width - RIGHT, xOf(t.length));
    if (x1 > x0) ctx.fillRect(x0, top - view.y + AXIS, x1 - x0, h);
    drawEvents(t, lists.compute, lists.computeLongest, row, true);
    drawEvents(t, lists.other, lists.otherLongest, row, false);
  }

  function drawEvents(t, list, longest, row, numbers) {
    const perPixel = (view.t1 - view.t0) / plotWidth();
    let drawnTo = -Infinity, lastKind = -1;
    ctx.textAlign = "center";
    ctx.textBaseline = "middle";
    for (let k = firstIndex(list, t.start, view.t0 - longest); k < list.length; k++) {
      const i = list[k];
      if (t.start[i] > view.t1) break;
      if (t.end[i] < view.t0) continue;
      const xEnd = xOf(t.end[i]), xStart = xOf(t.start[i]);
      if (xEnd < drawnTo + 0.5 && t.kind[i] === lastKind && t.bands[i] === 1) continue;  // hidden in a drawn pixel
      const kind = data.kinds[t.kind[i]];
      let [top, h] = bandOf(row, kind.lane);
      h /= t.bands[i];
      top += h * t.band[i] - view.y + AXIS;
      const a = Math.max(LEFT, xStart), b = Math.min(width - RIGHT, xEnd);
      const gap = xEnd - xStart > 4 ? 1 : 0;
      ctx.fillStyle = kind.fill;
      ctx.fillRect(a, top, Math.max(b - a - gap, perPixel > 0 ? 0.6 : 0), h);
      drawnTo = b; lastKind = t.kind[i];
      if (numbers && h >= 9) {
        const label = String(t.microbatch[i]);
        const full = `${kind.op}${t.stage[i]}.${label}`;
        const text = b - a > full.length * 7 + 8 ? full : b - a > label.length * 6.5 + 2 ? label : "";
        if (text) { ctx.fillStyle = kind.ink; ctx.fillText(text, (a + b - gap) / 2, top + h / 2 + 0.5); }
      }
      if (view.hover && view.hover.microbatch === t.microbatch[i] && view.hover.microbatch !== null && numbers && xEnd - xStart > 2) {
        ctx.strokeStyle = "#000";
        ctx.lineWidth = view.hover.k === row.k && view.hover.i === i ? 2.5 : 1.25;
        ctx.strokeRect(a + 0.5, top + 0.5, Math.max(b - a - gap - 1, 1), h - 1);
      }
    }
  }

  function drawMemory(row) {
    const bottom = row.y + row.h - 3 - view.y + AXIS, full = row.h - 7;
    data.timelines.forEach((t, k) => {
      const curve = t.memory[row.rank];
      if (!curve || !curve.t.length) return;
      const n = curve.t.length;
      let j = 0;
      { let lo = 0, hi = n; while (lo < hi) { const mid = (lo + hi) >> 1; if (curve.t[mid] <= view.t0) lo = mid + 1; else hi = mid; } j = Math.max(0, lo - 1); }
      const clamp = (x) => Math.min(width - RIGHT, Math.max(LEFT, x));
      const begin = clamp(xOf(curve.t[j]));
      const points = [];
      let column = -1, low = 0, high = 0, last = 0;
      for (; j < n && curve.t[j] <= view.t1; j++) {  // merge the steps of one pixel column into its lowest and highest
        const x = clamp(xOf(curve.t[j])), y = bottom - (curve.y[j] / peak) * full;
        if (Math.floor(x) === column) { low = Math.max(low, y); high = Math.min(high, y); last = y; points[points.length - 1] = [points[points.length - 1][0], low, high, last]; }
        else { column = Math.floor(x); low = high = last = y; points.push([x, y, y, y]); }
      }
      const end = clamp(xOf(Math.max(t.length, curve.t[n - 1])));
      if (!points.length) return;
      const trace = () => {
        let y = points[0][3];
        ctx.moveTo(begin, points[0][1]);
        points.forEach(([x, lo, hi, y1], q) => {
          if (q) ctx.lineTo(x, y);
          if (lo !== hi) { ctx.lineTo(x, hi); ctx.lineTo(x, lo); }
          ctx.lineTo(x, y1);
          y = y1;
        });
        ctx.lineTo(end, y);
      };
      if (k === 0) {
        ctx.beginPath(); trace(); ctx.lineTo(end, bottom); ctx.lineTo(begin, bottom); ctx.closePath();
        ctx.fillStyle = "#c9d3df"; ctx.fill();
      }
      ctx.beginPath(); trace();
      ctx.strokeStyle = LINES[k % LINES.length]; ctx.lineWidth = k ? 1.4 : 1; ctx.stroke();
    });
  }

  function ticks() {
    const span = (view.t1 - view.t0) * axisFactor, raw = span / Math.max(2, plotWidth() / 110);
    const power = 10 ** Math.floor(Math.log10(raw));
    const step = [1, 2, 5, 10].map((f) => f * power).find((s) => s >= raw) || 10 * power;
    const places = Math.max(0, Math.min(12, -Math.floor(Math.log10(step) + 1e-9)));
    const out = [];
    for (let n = Math.ceil((view.t0 * axisFactor) / step); n * step <= view.t1 * axisFactor; n++)
      out.push([(n * step) / axisFactor, (n * step).toFixed(places)]);
    return out;
  }

  function draw() {
    pending = false;
    const marks = ticks();
    ctx.clearRect(0, 0, width, height);
    ctx.font = "11px system-ui, 'DejaVu Sans', sans-serif";
    ctx.strokeStyle = "#e3e6ea"; ctx.lineWidth = 1;
    ctx.beginPath();
    for (const [t] of marks) { const x = Math.round(xOf(t)) + 0.5; ctx.moveTo(x, AXIS); ctx.lineTo(x, height); }
    ctx.stroke();
    for (const row of rows) {
      const y = row.y - view.y + AXIS;
      if (y > height || y + row.h < AXIS) continue;
      if (row.kind === "rank") drawRank(row);
      else if (row.kind === "memory") drawMemory(row);
      ctx.textBaseline = "middle";
      if (row.kind === "head") {
        ctx.textAlign = "left"; ctx.fillStyle = "#1c2430";
        ctx.font = "600 12px system-ui, 'DejaVu Sans', sans-serif";
        ctx.fillText(row.text, 12, y + row.h / 2 + 3);
        ctx.font = "11px system-ui, 'DejaVu Sans', sans-serif";
      } else {
        ctx.textAlign = "right"; ctx.fillStyle = "#3b4452";
        ctx.fillText(row.tag ? `${row.rank} ${row.tag}` : `rank ${row.rank}`, LEFT - 8, y + row.h / 2);
      }
    }
    ctx.fillStyle = "#ffffffee"; ctx.fillRect(0, 0, width, AXIS);
    ctx.fillStyle = "#3b4452"; ctx.textBaseline = "middle"; ctx.textAlign = "center";
    for (const [t, label] of marks) { const x = xOf(t); if (x > LEFT - 1 && x < width - 24) ctx.fillText(label, x, AXIS / 2); }
    ctx.textAlign = "left"; ctx.fillText(SI ? `time, ${axisUnit}` : "time, units", 8, AXIS / 2);
    ctx.strokeStyle = "#9aa3af"; ctx.beginPath(); ctx.moveTo(LEFT, AXIS - 0.5); ctx.lineTo(width - RIGHT, AXIS - 0.5); ctx.stroke();
    if (tall > height - AXIS) {  // where in the rows we are
      const room = height - AXIS, size = Math.max(24, (room * room) / tall);
      ctx.fillStyle = "#b6bdc7";
      ctx.fillRect(width - 7, AXIS + (view.y / Math.max(1, tall - room)) * (room - size), 5, size);
    }
  }
  const redraw = () => { if (!pending) { pending = true; requestAnimationFrame(draw); } };

  // ---- moving about -----------------------------------------------------------------------------------------------
  function setWindow(t0, t1) {
    const margin = total * 0.02, least = total * 1e-7;
    let span = Math.min(Math.max(t1 - t0, least), total + 2 * margin);
    t0 = Math.min(Math.max(t0, -margin), total + margin - span);
    view.t0 = t0; view.t1 = t0 + span;
    redraw();
  }
  const zoom = (factor, x = LEFT + plotWidth() / 2) => {
    const t = tOf(x);
    setWindow(t - (t - view.t0) * factor, t + (view.t1 - t) * factor);
  };
  const pan = (pixels) => { const dt = (pixels / plotWidth()) * (view.t1 - view.t0); setWindow(view.t0 + dt, view.t1 + dt); };
  const scroll = (pixels) => { view.y = Math.min(Math.max(0, view.y + pixels), Math.max(0, tall - (height - AXIS))); redraw(); };
  const fit = () => { view.y = 0; setWindow(0, total); };
  function group() {
    view.grouped = !view.grouped;
    document.getElementById("group").setAttribute("aria-pressed", String(view.grouped));
    layoutRows(); scroll(0);
  }
  function resize() {
    const ratio = window.devicePixelRatio || 1;
    width = canvas.clientWidth; height = canvas.clientHeight;
    canvas.width = Math.round(width * ratio); canvas.height = Math.round(height * ratio);
    ctx.setTransform(ratio, 0, 0, ratio, 0, 0);
    scroll(0);
  }

  // ---- hover ------------------------------------------------------------------------------------------------------
  function find(x, y) {
    if (x < LEFT || x > width - RIGHT || y < AXIS) return null;
    const row = rows.find((r) => y + view.y - AXIS >= r.y && y + view.y - AXIS < r.y + r.h);
    if (!row || row.kind === "head") return null;
    const t = tOf(x);
    if (row.kind === "memory") return { row, t, microbatch: null };
    const tl = data.timelines[row.k], lists = byRow[row.k][row.rank], at = y + view.y - AXIS;
    const slack = ((view.t1 - view.t0) / plotWidth()) * 1.5;
    for (const lane of ["other", "compute"]) {
      const list = lists[lane];
      for (let k = firstIndex(list, tl.start, t - lists[lane + "Longest"] - slack); k < list.length; k++) {
        const i = list[k];
        if (tl.start[i] > t + (lane === "other" ? slack : 0)) break;
        const [top, h] = bandOf(row, data.kinds[tl.kind[i]].lane), part = h / tl.bands[i];
        const above = top + part * tl.band[i];
        if (tl.end[i] + (lane === "other" ? slack : 0) >= t && at >= above - 1 && at <= above + part + 1)
          return { row, t, k: row.k, i, microbatch: tl.microbatch[i] };
      }
    }
    return null;
  }
  function levelAt(curve, t) {
    let lo = 0, hi = curve.t.length;
    while (lo < hi) { const mid = (lo + hi) >> 1; if (curve.t[mid] <= t) lo = mid + 1; else hi = mid; }
    return lo ? curve.y[lo - 1] : 0;
  }
  function describe(hit) {
    const lines = [];
    if (hit.row.kind === "memory") {
      lines.push(`rank ${hit.row.rank} at ${showTime(hit.t)}`);
      for (const t of data.timelines) {
        const curve = t.memory[hit.row.rank];
        if (!curve) continue;
        const still = t.static[hit.row.rank];
        lines.push(`${t.source}: ${showMemory(levelAt(curve, hit.t))}${SI ? "" : " activations"} live, peak ${showMemory(curve.peak)}` +
          (still ? `, plus ${showMemory(still)} of parameters and optimizer state` : ""));
      }
      return lines;
    }
    const t = data.timelines[hit.k], i = hit.i, kind = data.kinds[t.kind[i]];
    const lane = data.lanes.find((l) => l.name === kind.lane);
    lines.push(`${{ send: "send of ", tp: "collectives of " }[kind.lane] || ""}${kind.op}${t.stage[i]}.${t.microbatch[i]}`);
    lines.push(kind.title);
    lines.push(`stage ${t.stage[i]}${data.chunks > 1 ? ` (chunk ${kind.chunk})` : ""}, microbatch ${t.microbatch[i]}, rank ${t.rank[i]}, ${lane.title}`);
    lines.push(`${showTime(t.start[i])} → ${showTime(t.end[i])}, takes ${showTime(t.end[i] - t.start[i])}`);
    if (data.timelines.length > 1) lines.push(t.source);
    if (t.bands[i] > 1) lines.push("braided with another action in one slot");
    return lines;
  }
  function hover(x, y) {
    const hit = find(x, y);
    const changed = (hit && hit.i) !== (view.hover && view.hover.i) || (hit && hit.k) !== (view.hover && view.hover.k);
    view.hover = hit;
    if (changed) redraw();
    if (!hit) { tip.style.display = "none"; return; }
    tip.textContent = "";
    describe(hit).forEach((line, k) => {
      if (k) tip.append("\n");
      const part = document.createElement(k ? "span" : "b");
      part.textContent = line;
      tip.append(part);
    });
    tip.style.display = "block";
    tip.style.left = `${Math.min(x + 14, width - tip.offsetWidth - 4)}px`;
    tip.style.top = `${y + 18 + tip.offsetHeight > height ? y - tip.offsetHeight - 8 : y + 18}px`;
  }

  // ---- events -----------------------------------------------------------------------------------------------------
  let drag = null;
  canvas.addEventListener("wheel", (e) => {
    e.preventDefault();
    const unit = e.deltaMode === 1 ? 16 : e.deltaMode === 2 ? 400 : 1;
    if (e.shiftKey || Math.abs(e.deltaX) > Math.abs(e.deltaY)) pan((e.deltaX || e.deltaY) * unit);
    else if (e.ctrlKey || e.metaKey) scroll(e.deltaY * unit);
    else zoom(Math.exp(Math.max(-200, Math.min(200, e.deltaY * unit)) * 0.002), e.offsetX);
  }, { passive: false });
  canvas.addEventListener("pointerdown", (e) => { drag = [e.offsetX, e.offsetY]; canvas.setPointerCapture(e.pointerId); canvas.classList.add("dragging"); });
  canvas.addEventListener("pointerup", () => { drag = null; canvas.classList.remove("dragging"); });
  canvas.addEventListener("pointermove", (e) => {
    if (!drag) { hover(e.offsetX, e.offsetY); return; }
    pan(drag[0] - e.offsetX); scroll(drag[1] - e.offsetY);
    drag = [e.offsetX, e.offsetY];
    tip.style.display = "none";
  });
  canvas.addEventListener("pointerleave", () => { view.hover = null; tip.style.display = "none"; redraw(); });
  canvas.addEventListener("dblclick", (e) => zoom(0.4, e.offsetX));
  window.addEventListener("keydown", (e) => {
    const keys = {
      w: () => zoom(0.7), "+": () => zoom(0.7), "=": () => zoom(0.7), s: () => zoom(1 / 0.7), "-": () => zoom(1 / 0.7),
      a: () => pan(-plotWidth() / 8), d: () => pan(plotWidth() / 8), arrowleft: () => pan(-plotWidth() / 8),
      arrowright: () => pan(plotWidth() / 8), arrowup: () => scroll(-80), arrowdown: () => scroll(80), 0: fit, g: group,
    };
    const act = !e.ctrlKey && !e.metaKey && !e.altKey && keys[e.key.toLowerCase()];
    if (act) { e.preventDefault(); act(); }
  });
  document.getElementById("in").onclick = () => zoom(0.6);
  document.getElementById("out").onclick = () => zoom(1 / 0.6);
  document.getElementById("fit").onclick = fit;
  document.getElementById("group").onclick = group;
  if (data.timelines.length < 2) document.getElementById("group").style.display = "none";
  window.addEventListener("resize", resize);

  // ---- heading ----------------------------------------------------------------------------------------------------
  document.getElementById("title").textContent = data.title;
  const legend = document.getElementById("legend");
  const addLegend = (fill, text) => {
    const item = document.createElement("span"), box = document.createElement("i");
    box.style.background = fill;
    item.append(box, text);
    legend.append(item);
  };
  const seen = new Set();
  for (const kind of data.kinds) {
    const text = { send: "transfer to another rank", tp: "collectives" }[kind.lane] || kind.title;
    if (!seen.has(text)) { seen.add(text); addLegend(kind.fill, text); }
  }
  if (data.chunks > 1) {
    const item = document.createElement("span");
    item.textContent = `paler: later of ${data.chunks} chunks`;
    legend.append(item);
  }
  layoutRows();
  resize();
  window.jaxpipeViewer = { data, view, rows: () => rows, setWindow, zoom, pan, scroll, fit, group, find, describe, draw };
})();
