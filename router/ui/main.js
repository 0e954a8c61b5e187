// Starts the page: follows the router's state, draws it, and asks for a key where one is needed.

import { storedKey, storeKey, watch } from "./api.js";
import { startChat } from "./chat.js";
import { byId, setText } from "./dom.js";
import { showFigures } from "./figures.js";
import { Timeline } from "./timeline.js";
import { showWorkers } from "./workers.js";

const LONGEST_WAIT_MS = 8000;
// A router speaks twice a second; after this silence it counts as lost.
const SILENCE_MS = 6000;

const timeline = new Timeline(byId("timeline"), byId("request-rows"));
const chat = startChat(needKey);
let model = "";
let keyIsWanted = false;
let wake = () => {};

byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  storeKey(byId("key").value.trim());
  byId("key").value = "";
  keyIsWanted = false;
  wake();
});

byId("forget-key").addEventListener("click", () => {
  storeKey("");
  location.reload();
});

follow();

/** Follow the router for as long as the page lives. */
async function follow() {
  for (let failures = 0; ; failures += 1) {
    try {
      for await (const state of heard("ui/events")) {
        failures = 0;
        show(state);
      }
      failures = -1; // It ended as agreed: at once again.
    } catch (problem) {
      if (problem.status === 401) needKey();
      else link("lost", problem.status === 503 ? "Router is shutting down" : "Router is away, trying again");
    }
    if (keyIsWanted) await new Promise((resolve) => (wake = resolve));
    else if (failures >= 0) await pause(Math.min(500 * 2 ** failures, LONGEST_WAIT_MS));
  }
}

/** The states of a stream that is given up after a silence. */
async function* heard(path) {
  const control = new AbortController();
  let timer = setTimeout(() => control.abort(), SILENCE_MS);
  try {
    for await (const state of watch(path, control.signal)) {
      clearTimeout(timer);
      timer = setTimeout(() => control.abort(), SILENCE_MS);
      yield state;
    }
  } finally {
    clearTimeout(timer);
    control.abort();
  }
}

function show(state) {
  link("live", "Live");
  byId("key-form").hidden = !keyIsWanted;
  byId("forget-key").hidden = !storedKey();
  if (state.model !== model) {
    model = state.model;
    setText(byId("model"), model);
    document.title = `${model} · kvferry`;
    chat.use(model);
  }
  showFigures(state);
  showWorkers(state);
  timeline.take(state);
}

function link(name, words) {
  byId("link").dataset.state = name;
  document.body.classList.toggle("stale", name !== "live");
  setText(byId("link"), words);
}

/** Ask for a key; a wrong one is forgotten. */
function needKey() {
  const wasWrong = Boolean(storedKey());
  storeKey("");
  keyIsWanted = true;
  link("lost", "Needs a key");
  byId("forget-key").hidden = true;
  if (wasWrong) setText(byId("key-note"), "The router does not know this key.");
  byId("key-form").hidden = false;
  byId("key").focus();
}

const pause = (ms) => new Promise((resolve) => setTimeout(resolve, ms));
