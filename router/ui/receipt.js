// The KV receipt of an answer: one line, and behind it all that it proves.

import { bytes, count, duration, el } from "./dom.js";

const TIMES = [
  ["queue", "queue_ms", "phase-queued"],
  ["prefill", "prefill_ms", "phase-prefill"],
  ["transfer", "exposed_transfer_ms", "phase-transfer"],
  ["commit", "commit_ms", "phase-commit"],
  ["decode", "decode_ms", "phase-decode"],
];

export function receiptView(receipt) {
  const moved = receipt.prefill_worker !== receipt.decode_worker;
  const name = el("span", { class: "receipt-name" }, "KV receipt");
  const summary = el("summary", {}, name, " ", ...headline(receipt, moved));
  return el("details", { class: "receipt" }, summary, timeBar(receipt), facts(receipt, moved));
}

function headline(receipt, moved) {
  const words = moved
    ? `${receipt.prefill_worker} → ${receipt.decode_worker} · ${receipt.transport} · ${bytes(receipt.bytes_sent)} `
    : `${receipt.decode_worker} did both · nothing moved `;
  return moved ? [words, verdict(receipt)] : [words];
}

function verdict(receipt) {
  return receipt.checksum_verified
    ? el("span", { class: "good" }, "✓ verified")
    : el("span", { class: "bad" }, "✕ not verified");
}

/** Where the time went. Of the transfer only what prefill did not hide. */
function timeBar(receipt) {
  const bar = el("div", { class: "times", "aria-hidden": "true" });
  const words = el("ul", { class: "legend" });
  for (const [name, field, kind] of TIMES) {
    if (receipt[field] <= 0) continue;
    const part = el("span", { class: kind });
    part.style.flexGrow = String(receipt[field]);
    bar.append(part);
    words.append(el("li", { class: kind }, `${name} ${duration(receipt[field])}`));
  }
  return el("div", {}, bar, words);
}

function facts(receipt, moved) {
  const hidden = Math.round(receipt.hidden_share * 100);
  const rows = [
    ["Prefilled on", receipt.prefill_worker],
    ["Decoded on", receipt.decode_worker],
    ["Attempt", receipt.attempt > 1 ? `${receipt.attempt}: it went on after a failure` : "1"],
  ];
  if (moved) {
    rows.push(
      ["Transport", transport(receipt)],
      ["KV moved", `${bytes(receipt.bytes_sent)} in ${count(receipt.blocks_sent, "block")}`],
      ["Transfer", `${duration(receipt.transfer_ms)}, ${hidden} % of it hidden behind prefill`],
      ["Checksum", checksum(receipt)],
    );
  }
  rows.push(
    ["Prompt", count(receipt.prompt_tokens, "token")],
    ["Found cached", `${receipt.prefill_cached_tokens} on prefill, ${receipt.decode_cached_tokens} on decode`],
    ["Recomputed", count(receipt.tokens_recomputed, "token")],
  );
  for (const move of receipt.migrations) {
    rows.push(["Moved on", `${move.from_worker} → ${move.to_worker} after ${count(move.output_tokens, "token")}`]);
  }
  for (const failure of receipt.earlier_failures) rows.push(["Before that", failure]);
  rows.push(["Why there", receipt.plan_reason], ["Request", receipt.request_id]);
  return el("dl", {}, ...rows.flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, value)]));
}

function transport(receipt) {
  const detail = receipt.transport_detail ? ` (${receipt.transport_detail})` : "";
  const expected = receipt.expected_transport;
  const worse = expected && expected !== receipt.transport ? `, expected ${expected}` : "";
  return `${receipt.transport}${detail}${worse}`;
}

function checksum(receipt) {
  const text = el("span", {}, verdict(receipt), " ");
  text.append(el("code", {}, receipt.checksum.slice(0, 16) || "none"));
  return text;
}
