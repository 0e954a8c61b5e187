// One card for each worker: its pool as a grid of cells that fills from the left, its state, what it has to do.

import { byId, count, el, setText, svg } from "./dom.js";

const COLUMNS = 36;
const ROWS = 6;
const PITCH = 7;
const CELL = 6;
const KINDS = ["used", "quarantined", "cached", "free"];

const cards = new Map();
const states = new Map();

export function showWorkers(state) {
  const seen = new Set(state.workers.map((worker) => worker.id));
  for (const [id, card] of cards) {
    if (!seen.has(id)) {
      card.root.remove();
      cards.delete(id);
      states.delete(id);
    }
  }
  const list = byId("workers");
  state.workers.forEach((worker, index) => {
    const card = cards.get(worker.id) ?? newCard(worker);
    cards.set(worker.id, card);
    if (list.children[index] !== card.root) list.insertBefore(card.root, list.children[index] ?? null);
    update(card, worker);
  });
  byId("no-workers").hidden = seen.size > 0;
  tellChanges(state.workers);
}

function newCard(worker) {
  const cells = Array.from({ length: COLUMNS * ROWS }, (_, index) =>
    svg("rect", {
      x: Math.floor(index / ROWS) * PITCH,
      y: (index % ROWS) * PITCH,
      width: CELL,
      height: CELL,
      rx: 1,
    }),
  );
  const viewBox = `0 0 ${COLUMNS * PITCH - 1} ${ROWS * PITCH - 1}`;
  const pool = svg("svg", { class: "pool", role: "img", viewBox }, ...cells);
  const stateText = el("span", { class: "state" });
  const blocks = el("p", { class: "blocks" });
  const load = el("p", { class: "load" });
  const head = el("div", { class: "worker-head" }, el("h3", {}, worker.id), stateText);
  return { root: el("li", { class: "worker" }, head, pool, blocks, load), cells, pool, stateText, blocks, load };
}

function update(card, worker) {
  const { blocks } = worker;
  card.root.dataset.worker = worker.id;
  card.root.dataset.role = worker.role;
  card.root.dataset.state = worker.state;
  setText(card.stateText, stateWords(worker));
  const gone = worker.state === "lost" || worker.state === "left";
  const kinds = cellKinds(blocks, card.cells.length);
  card.cells.forEach((cell, index) => cell.setAttribute("class", kinds[index] ? `block-${kinds[index]}` : "none"));
  const words = `${blocks.used} used · ${blocks.cached} cached · ${blocks.free} free`;
  const held = blocks.quarantined ? ` · ${blocks.quarantined} quarantined` : "";
  card.pool.setAttribute("aria-label", `${count(blocks.total, "KV block")}: ${words}${held}`);
  setText(card.blocks, gone ? "its requests go on elsewhere" : words);
  const busy = [["running", worker.running], ["receiving", worker.receiving], ["waiting", worker.waiting]];
  const sequences = busy.filter(([, number]) => number > 0).map(([name, number]) => `${number} ${name}`);
  setText(card.load, gone ? `${worker.role} worker` : `${worker.role} · ${sequences.join(" · ") || "idle"}${held}`);
}

function stateWords(worker) {
  const ago = worker.gone_s === null ? "" : `${Math.round(worker.gone_s)} s ago`;
  if (worker.state === "lost") return `lost ${ago}`;
  if (worker.state === "left") return `drained and left ${ago}`;
  return worker.gone_s === null ? worker.state : `${worker.state} · was lost ${ago}`;
}

/** What each cell shows. A pool smaller than the grid has a cell a block; in a larger one whatever there is of a kind
 * has a cell at least. */
function cellKinds(blocks, numCells) {
  const total = Math.max(1, blocks.total);
  const shown = Math.min(numCells, total);
  const kinds = [];
  for (const kind of KINDS.slice(0, 3)) {
    const share = (blocks[kind] / total) * shown;
    const cells = blocks[kind] ? Math.max(1, Math.round(share)) : 0;
    for (let i = 0; i < cells && kinds.length < shown; i += 1) kinds.push(kind);
  }
  while (kinds.length < shown) kinds.push("free");
  return kinds;
}

/** Say it when a worker's state changes, for those who do not see it. */
function tellChanges(workers) {
  const news = [];
  for (const worker of workers) {
    const before = states.get(worker.id);
    if (before !== undefined && before !== worker.state) news.push(`${worker.id} is ${worker.state}`);
    states.set(worker.id, worker.state);
  }
  if (news.length > 0) setText(byId("worker-news"), news.join(", "));
}
