// Requests as bars that scroll left with time. A request keeps its lane; lanes are used again when they are free.
//
// What is drawn lies a little in the past, so that the end of a phase is known before its place comes into sight.

import { count, el, setText, svg } from "./dom.js";

const DELAY_S = 0.8;
const LANE_HEIGHT = 22;
const BAR_HEIGHT = 14;
const MAX_LANES = 14;
const MIN_LANES = 9;
const AXIS_HEIGHT = 20;
const MIN_SEGMENT = 3;
const GAP_S = 0.4;
const FRAME_MS = 100;
const ENDS = new Set(["finished", "failed", "cancelled"]);
const CLOCK_DRIFT = 0.0005;

export class Timeline {
  constructor(root, rows) {
    this.rows = rows;
    this.grid = svg("g", { class: "grid" });
    this.bars = svg("g");
    this.labels = svg("g", { class: "labels" });
    this.axis = svg("g", { class: "axis-words" });
    this.picture = svg("svg", { role: "img" }, this.grid, this.bars, this.labels, this.axis);
    this.more = el("p", { class: "more" });
    root.append(this.picture, this.more);
    this.root = root;
    this.requests = [];
    this.lanes = new Map();
    this.offset = null;
    this.lastFrame = 0;
    this.calm = matchMedia("(prefers-reduced-motion: reduce)");
    new ResizeObserver(() => this.draw()).observe(root);
    const frame = (at) => {
      // Nothing to see, nothing to move: each new state is drawn anyway.
      if (!this.calm.matches && this.lanes.size > 0 && at - this.lastFrame >= FRAME_MS) {
        this.lastFrame = at;
        this.draw();
      }
      requestAnimationFrame(frame);
    };
    requestAnimationFrame(frame);
  }

  /** Take a new state. */
  take(state) {
    // The quickest message is the nearest to the router's clock; a slow one must not make time jump.
    const offset = performance.now() / 1000 - state.now;
    this.offset = this.offset === null || offset < this.offset ? offset : this.offset + CLOCK_DRIFT;
    if (offset - this.offset > 2) this.offset = offset; // Another router, or one that was started again.
    this.requests = state.requests;
    this.draw();
    this.list(state.now);
  }

  draw() {
    const width = this.root.clientWidth;
    if (this.offset === null || width === 0) return;
    const now = performance.now() / 1000 - this.offset - DELAY_S;
    const narrow = width < 520;
    const view = { now, window: narrow ? 15 : 30, right: width - (narrow ? 84 : 132), width };
    view.x = (at) => view.right - ((now - at) / view.window) * view.right;
    const shown = this.assignLanes(view);
    const numLanes = Math.max(MIN_LANES, ...shown.map((request) => this.lanes.get(request.id) + 1));
    const height = numLanes * LANE_HEIGHT;
    this.picture.setAttribute("width", width);
    this.picture.setAttribute("height", height + AXIS_HEIGHT);
    this.drawGrid(view, height);
    this.drawBars(view, shown);
  }

  /** Those that have a lane now. The others are only counted. */
  assignLanes(view) {
    const from = view.now - view.window;
    const visible = this.requests.filter((request) => begin(request) <= view.now && endOf(request, view.now) > from);
    const known = new Set(visible.map((request) => request.id));
    for (const id of this.lanes.keys()) if (!known.has(id)) this.lanes.delete(id);
    const freeAt = [];
    for (const request of visible) {
      const lane = this.lanes.get(request.id);
      if (lane !== undefined) freeAt[lane] = Math.max(freeAt[lane] ?? 0, endOf(request, Infinity));
    }
    let hidden = 0;
    for (const request of visible.toSorted((a, b) => begin(a) - begin(b))) {
      if (this.lanes.has(request.id)) continue;
      let lane = 0;
      while (lane < MAX_LANES && (freeAt[lane] ?? 0) + GAP_S > begin(request)) lane += 1;
      if (lane === MAX_LANES) {
        hidden += 1;
        continue;
      }
      this.lanes.set(request.id, lane);
      freeAt[lane] = endOf(request, Infinity);
    }
    setText(this.more, hidden > 0 ? `and ${count(hidden, "more request")}, for which there is no room here` : "");
    const shown = visible.filter((request) => this.lanes.has(request.id));
    const words = `Timeline of ${count(shown.length, "request")}; the table below says the same`;
    this.picture.setAttribute("aria-label", words);
    return shown;
  }

  drawGrid(view, height) {
    const lines = [];
    for (let at = Math.ceil((view.now - view.window) / 5) * 5; at <= view.now; at += 5) {
      lines.push(svg("path", { d: `M${view.x(at).toFixed(1)} 0V${height}` }));
    }
    lines.push(svg("path", { class: "now", d: `M${view.right + 0.5} 0V${height}` }));
    this.grid.replaceChildren(...lines);
    const y = height + 14;
    const words = (x, anchor, text) => svg("text", { x, y, "text-anchor": anchor }, text);
    this.axis.replaceChildren(
      words(0, "start", `${view.window} s ago`),
      words(view.right / 2, "middle", `${view.window / 2} s ago`),
      words(view.right, "middle", "now"),
    );
  }

  drawBars(view, shown) {
    const bars = [];
    const labels = [];
    for (const request of shown) {
      const y = this.lanes.get(request.id) * LANE_HEIGHT + (LANE_HEIGHT - BAR_HEIGHT) / 2;
      const last = request.phases.at(-1);
      let edge = -Infinity;
      request.phases.forEach(([phase, at], index) => {
        if (at > view.now) return;
        if (ENDS.has(phase)) {
          if (phase !== "finished") bars.push(endMark(phase, Math.max(edge, view.x(at)), y));
          return;
        }
        const until = Math.min(request.phases[index + 1]?.[1] ?? view.now, view.now);
        if (phase === "queued" && until - at < 0.005) return;
        const x = Math.max(edge, view.x(at), 0);
        const next = Math.max(view.x(until), Math.max(edge, view.x(at)) + MIN_SEGMENT);
        edge = Math.min(next, view.right);
        const attributes = { class: `phase-${phase}`, x: x.toFixed(1), y, height: BAR_HEIGHT, rx: 1.5 };
        if (edge > x) bars.push(svg("rect", { ...attributes, width: (edge - x).toFixed(1) }));
      });
      if (!ENDS.has(last[0]) || last[1] > view.now) labels.push(liveLabel(request, view, y));
    }
    this.bars.replaceChildren(...bars);
    this.labels.replaceChildren(...labels);
  }

  /** The table. */
  list(now) {
    const rows = this.requests.slice(0, 40).map((request) => {
      const [phase, since] = request.phases.at(-1);
      const error = request.error ? ` (${request.error})` : "";
      const ago = `${Math.max(0, now - since).toFixed(1)} s${ENDS.has(phase) ? " ago" : ""}`;
      const cells = [
        request.id,
        `${phase}${error} ${ago}${request.attempt > 1 ? `, attempt ${request.attempt}` : ""}`,
        workersOf(request),
        `${request.prompt_tokens} in, ${request.output_tokens} out`,
        request.waits_for || "–",
      ];
      return el("tr", {}, ...cells.map((text, index) => el(index ? "td" : "th", index ? {} : { scope: "row" }, text)));
    });
    this.rows.replaceChildren(...rows);
  }
}

const begin = (request) => request.phases[0][1];

function endOf(request, now) {
  const [phase, at] = request.phases.at(-1);
  return ENDS.has(phase) ? at : now;
}

function workersOf(request) {
  if (!request.decode_worker) return "none yet";
  if (request.prefill_worker === request.decode_worker) return request.decode_worker;
  return `${request.prefill_worker} → ${request.decode_worker}`;
}

function endMark(phase, x, y) {
  const middle = y + BAR_HEIGHT / 2;
  return svg("path", { class: `end-${phase}`, d: `M${x - 3} ${middle - 4}l7 8m0-8l-7 8` });
}

function liveLabel(request, view, y) {
  const [phase, , worker] = request.phases.findLast(([name, at]) => at <= view.now && !ENDS.has(name));
  const where = worker || phase;
  const words = view.width < 520 ? where : `${where} · ${request.output_tokens}`;
  return svg("text", { x: view.right + 7, y: y + BAR_HEIGHT - 3 }, words);
}
