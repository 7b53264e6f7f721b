// The admin page's tables: choices, where prompts were computed, hand-offs, slow requests. Loaded before page.js, whose
// words and numbers it uses when it is called.

"use strict";

// Rows of cells; a cell is a text, or {text, title}. Cells stay as they are while nothing changes.
function showTable(id, head, rows) {
  const section = document.getElementById(id);
  section.hidden = rows.length === 0;
  const text = JSON.stringify([head, rows]);
  if (section.dataset.shown === text) return;
  section.dataset.shown = text;
  const line = (cells, tag) => {
    const row = document.createElement("tr");
    for (const cell of cells) {
      const node = document.createElement(tag);
      node.textContent = cell.text ?? cell;
      if (cell.title) node.title = cell.title;
      row.append(node);
    }
    return row;
  };
  section.querySelector("thead").replaceChildren(line(head, "th"));
  section.querySelector("tbody").replaceChildren(...rows.map((row) => line(row, "td")));
}

function showChoices(choosers) {
  const alike = new Map(); // a choice → those who made it
  for (const [name, decisions] of choosers) {
    for (const each of decisions) {
      const text = JSON.stringify(each);
      alike.set(text, { each, names: [...(alike.get(text)?.names ?? []), name] });
    }
  }
  const rows = [...alike.values()].map(({ each, names }) => [names.join(", "), each.name, each.value, each.why, each.force]);
  showTable("choices", ["of", "what", "chosen", "why", "forced by"], rows);
}

function showPlacements(counts) {
  const sum = (some) => some.reduce((total, each) => total + each.count, 0);
  const split = sum(counts.filter((each) => each.reason.startsWith("remote_")));
  setText($("placements-summary"), `of the last ${plural(sum(counts), "request")}, ${whole.format(split)} split between two workers`);
  showTable("placements", ["requests", "why"], counts.map((each) => [whole.format(each.count), each.text]));
}

function bytes(count) {
  const [unit, size] = [["GB", 1e9], ["MB", 1e6], ["kB", 1e3]].find(([, each]) => count >= each) ?? ["B", 1];
  return `${size === 1 ? count : tenth.format(count / size)} ${unit}`;
}

// Who sent in rows, who received in columns.
function showHandoffs(pairs) {
  const names = (side) => [...new Set(pairs.map((pair) => pair[side]))].sort();
  const targets = names("target");
  const cell = (source, target) => {
    const pair = pairs.find((each) => each.source === source && each.target === target);
    if (!pair) return "";
    const text = `${whole.format(pair.count)} · ${bytes(pair.num_bytes)} · ${latency(pair.median_s)} · ${pair.transport}`;
    return { text, title: pair.passed_over && `passed over: ${pair.passed_over}` };
  };
  const rows = names("source").map((source) => [source, ...targets.map((target) => cell(source, target))]);
  showTable("handoffs", ["from \\ to", ...targets], rows);
}

function showSlow(requests) {
  const rows = requests.map((each) => [
    each.request_id,
    each.trace_id,
    each.outcome,
    latency(each.total_s),
    each.first_token_s ? latency(each.first_token_s) : "–",
    `${whole.format(each.prompt_tokens)} + ${whole.format(each.completion_tokens)}`,
    each.prefill === each.decode ? each.decode : `${each.prefill} → ${each.decode}`,
  ]);
  showTable("slow", ["request", "trace", "outcome", "in all", "first token", "tokens", "on"], rows);
}
