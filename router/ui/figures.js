// The figures of the last minute, and the bytes of each second.

import { byId, bytes, duration, setText, svg } from "./dom.js";

const WIDTH = 240;
const HEIGHT = 36;

export function showFigures(state) {
  for (const name of ["ttft", "tpot"]) {
    setText(byId(`${name}-p50`), duration(state[name].p50_ms));
    setText(byId(`${name}-p99`), duration(state[name].p99_ms));
  }
  setText(byId("in-flight"), String(state.in_flight));
  setText(byId("in-flight-noun"), state.in_flight === 1 ? "request" : "requests");
  setText(byId("queued"), String(state.queued));
  showBandwidth(state.bytes_per_second);
}

function showBandwidth(sizes) {
  const peak = Math.max(...sizes);
  setText(byId("bandwidth"), `${bytes(peak)}/s`);
  const step = WIDTH / sizes.length;
  const bars = sizes.flatMap((size, second) => {
    if (size === 0) return [];
    const height = Math.max(2, (size / peak) * (HEIGHT - 1));
    return [svg("rect", { x: second * step, y: HEIGHT - height, width: step - 0.8, height })];
  });
  byId("bandwidth-chart").replaceChildren(svg("path", { class: "axis", d: `M0 ${HEIGHT}H${WIDTH}` }), ...bars);
}
