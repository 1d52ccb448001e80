// Draws the timeline and the trajectory browser from the page's JSON. Text of models, environments and users is only
// ever inserted as text.
"use strict";

const data = JSON.parse(document.getElementById("run-data").textContent);

function element(tag, { className, text, title, style } = {}, children = []) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  if (title) made.title = title;
  if (style) Object.assign(made.style, style);
  made.append(...children);
  return made;
}

const short = number => (number === null || number === undefined ? "–" : Number(number.toPrecision(3)).toString());
const signed = number => (number > 0 ? "+" : "") + short(number);

// ---- Charts: a chart that was drawn while the page was being laid out gets its final width, and every later one.

const widths = new ResizeObserver(entries => { for (const { target } of entries) Plotly.Plots.resize(target); });
for (const chart of document.querySelectorAll(".plotly-graph-div")) widths.observe(chart);

// ---- Timeline

const SVG = "http://www.w3.org/2000/svg";
const COLORS = { ...data.phase_colors, trainer: "#2563eb", publish: "#e11d48", evaluation: "#65a30d", checkpoint: "#92400e" };

function shape(parent, tag, attributes, text) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text !== undefined) made.textContent = text;
  parent.append(made);
  return made;
}

function drawTimeline(window, picture) {
  const width = Math.max(280, picture.clientWidth), margin = 84, rowHeight = 20;
  const laneHeight = Math.max(5, Math.min(14, 420 / Math.max(1, window.num_lanes)));
  const rows = window.tracks.length, top = 4, groupsTop = top + rows * rowHeight + 8;
  const height = groupsTop + window.num_lanes * laneHeight + 26;
  const scale = (width - margin - 10) / Math.max(1e-6, window.seconds);
  const drawing = document.createElementNS(SVG, "svg");
  drawing.setAttribute("viewBox", `0 0 ${width} ${height}`);
  drawing.setAttribute("height", height);
  window.tracks.forEach((track, row) => shape(drawing, "text", { x: 0, y: top + row * rowHeight + 13 }, track));
  if (window.num_lanes) shape(drawing, "text", { x: 0, y: groupsTop + 11 }, "groups");
  const step = [0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1800, 3600, 7200, 21600, 86400]
    .find(one => one * scale >= 60) || window.seconds;
  for (let at = 0; at <= window.seconds; at += step) {
    const x = margin + at * scale;
    shape(drawing, "line", { x1: x, x2: x, y1: 0, y2: height - 20, stroke: "var(--line)" });
    if (x < width - 30) shape(drawing, "text", { x: x + 2, y: height - 6 }, `${Number(at.toFixed(1))} s`);
  }
  for (const [row, begin, length, name, tooltip] of window.slices) {
    const isRun = row < rows;
    const made = shape(drawing, "rect", {
      x: margin + begin * scale, width: Math.max(1, length * scale - 0.5), rx: 1.5,
      y: isRun ? top + row * rowHeight : groupsTop + (row - rows) * laneHeight,
      height: isRun ? rowHeight - 4 : Math.max(3, laneHeight - 1),
      fill: COLORS[isRun ? window.tracks[row] : name] || "#94a3b8",
    });
    shape(made, "title", {}, `${name}, ${length.toFixed(3)} s${tooltip ? `\n${tooltip}` : ""}`);
  }
  picture.replaceChildren(drawing);
  if (window.num_lanes_left_out) {
    picture.append(element("p", { className: "caption", text: `${window.num_lanes_left_out} more lanes of groups are in the file only.` }));
  }
}

const picture = document.getElementById("timeline-picture");
if (picture) {
  const choice = document.getElementById("timeline-window");
  data.timeline.forEach((window, index) => choice.append(new Option(window.label, index)));
  choice.value = String(data.timeline.length - 1);
  let drawnWidth = 0;
  const draw = () => { drawnWidth = picture.clientWidth; drawTimeline(data.timeline[Number(choice.value)], picture); };
  choice.addEventListener("change", draw);
  new ResizeObserver(() => { if (picture.clientWidth !== drawnWidth) draw(); }).observe(picture);
  draw();
}

// ---- Trajectory browser

const stalenessColor = age => data.staleness_colors[Math.max(0, Math.min(age, data.staleness_colors.length - 1))];
const trainedAt = member => Math.min(...member.spans.map(([version]) => version)) + member.staleness;

// Of a token: its color for a shading, or null.
const SHADINGS = {
  "nothing": () => null,
  "version": (stretch, index, member) => `${stalenessColor(trainedAt(member) - stretch.versions[index])}44`,
  "advantage": (stretch, index) => diverging(stretch.advantages && stretch.advantages[index], 2),
  "logprob": (stretch, index) => `rgba(225, 29, 72, ${Math.min(0.7, -(stretch.logprobs[index] || 0) / 6)})`,
  "logprob difference": (stretch, index) =>
    diverging(stretch.trained && stretch.trained[index] !== null ? stretch.trained[index] - stretch.logprobs[index] : null, 0.5),
};

function diverging(value, full) {
  if (value === null || value === undefined) return null;
  const strength = Math.min(0.65, 0.65 * Math.abs(value) / full);
  return value > 0 ? `rgba(5, 150, 105, ${strength})` : `rgba(220, 38, 38, ${strength})`;
}

function tokenTitle(stretch, index) {
  const lines = [`version ${stretch.versions[index]}`, `logprob ${short(stretch.logprobs[index])} when sampled`];
  if (stretch.trained && stretch.trained[index] !== null) lines.push(`${short(stretch.trained[index])} when trained`);
  if (stretch.advantages && stretch.advantages[index] !== null) lines.push(`advantage ${signed(stretch.advantages[index])}`);
  return lines.join("\n");
}

function whoView(turn) {
  const count = `${turn.num_tokens} token${turn.num_tokens === 1 ? "" : "s"}`;
  const thread = turn.thread && turn.thread !== "main" && `in ${turn.thread}`;
  const seconds = turn.seconds > 0 && `${short(turn.seconds)} s`;
  const facts = [turn.role, thread, count, seconds, turn.finish_reason === "length" && "cut off",
                 turn.interruptions > 0 && `${turn.interruptions} times interrupted`];
  return element("span", { className: "who", text: facts.filter(Boolean).join(" · ") });
}

function stretchView(stretch, member, shading) {
  if (stretch.role !== "policy") return element("div", { className: "turn environment" }, [whoView(stretch), stretch.texts.join("")]);
  const tokens = stretch.texts.map((text, index) => {
    const color = SHADINGS[shading](stretch, index, member);
    return element("span", { className: "token", text, title: tokenTitle(stretch, index), style: color ? { background: color } : undefined });
  });
  return element("div", { className: "turn" }, [whoView(stretch), ...tokens]);
}

const turnView = turn => element("div", { className: `turn ${turn.role}` }, [whoView(turn), turn.text]);

function chip(member, range) {
  const isHigh = member.reward !== null && range.high > range.low && member.reward >= (range.low + range.high) / 2;
  const kind = member.reward === null || range.high <= range.low ? "" : isHigh ? "high" : "low";
  return element("span", { className: `chip ${kind}`, text: short(member.reward), title: member.name });
}

function memberView(member, range, shading) {
  const total = member.spans.reduce((sum, [, count]) => sum + count, 0) || 1;
  const bars = member.spans.map(([version, count]) => element("i", {
    style: { width: `${100 * count / total}%`, background: stalenessColor(trainedAt(member) - version) },
    title: `version ${version}: ${count} tokens, staleness ${trainedAt(member) - version}`,
  }));
  const facts = [
    member.name,
    member.versus_group !== null && `${signed(member.versus_group)} in its group`,
    ...(Object.keys(member.parts).length > 1 ? Object.entries(member.parts).map(([name, value]) => `${name} ${short(value)}`) : []),
    `${member.num_tokens} tokens`,
    member.spans.map(([version, count]) => `v${version}·${count}`).join(" "),
    member.end === "length" ? "cut off" : member.end,
    member.retried_after && `retried after: ${member.retried_after}`,
    member.num_left_out > 0 && `${member.num_left_out} tokens not shown`,
  ].filter(Boolean);
  const head = element("div", { className: "head" }, [chip(member, range), element("span", { className: "spans" }, bars),
                                                     ...facts.map(text => element("span", { text }))]);
  const turns = member.stretches ? member.stretches.map(one => stretchView(one, member, shading)) : member.turns.map(turnView);
  return element("div", { className: "member" }, [head, element("div", { className: "text" }, turns)]);
}

function rangeOf(group) {
  const all = data.groups.filter(one => one.source === group.source).flatMap(one => one.members.map(member => member.reward)).filter(one => one !== null);
  return { low: Math.min(...all), high: Math.max(...all) };
}

function groupView(group, range, shading) {
  const what = group.source === "training" ? `step ${group.step} · group ${group.group}` : `evaluation at v${group.step}${group.set && ` · ${group.set}`}`;
  const view = element("details", { className: "group" }, [element("summary", {}, [
    element("span", { className: "what", text: what }),
    element("span", { className: "begin", text: `${group.task}  ${group.prompt.slice(-160).replaceAll("\n", " ")}`, title: group.task }),
    element("span", { className: "chips" }, group.members.map(member => chip(member, range))),
  ])]);
  let shownAs = null;
  const fill = () => {
    if (!view.open || shownAs === shading()) return;
    shownAs = shading();
    view.querySelector(".body")?.remove();
    view.append(element("div", { className: "body" }, [
      element("div", { className: "text prompt", text: group.prompt }),
      ...group.members.map(member => memberView(member, range, shading())),
    ]));
  };
  view.addEventListener("toggle", fill);
  view.refill = fill;
  return view;
}

const memberText = member => (member.stretches || []).map(one => one.texts.join("")).join("") + (member.turns || []).map(turn => turn.text).join("");
const KINDS = {
  "all": () => true,
  "mixed rewards": group => new Set(group.members.map(member => member.reward)).size > 1,
  "equal rewards": group => new Set(group.members.map(member => member.reward)).size === 1,
  "cut off": group => group.members.some(member => member.end === "length"),
  "retried": group => group.members.some(member => member.retried_after),
  "over two versions or more": group => group.members.some(member => member.spans.length > 1),
};
const ORDERS = {
  "newest first": null,
  "lowest reward first": group => Math.min(...group.members.map(member => member.reward ?? 0)),
  "highest reward first": group => -Math.max(...group.members.map(member => member.reward ?? 0)),
  "longest first": group => -Math.max(...group.members.map(member => member.num_tokens)),
};
const SHOWN_AT_ONCE = 60;

const list = document.getElementById("groups");
if (list) {
  const field = name => document.getElementById(`browse-${name}`);
  const options = (name, values) => { for (const value of values) field(name).append(new Option(value.label ?? value, value.value ?? value)); };
  const sources = [...new Set(data.groups.map(group => group.source === "training" ? "training" : `evaluation${group.set && `: ${group.set}`}`))];
  options("source", sources);
  options("kind", Object.keys(KINDS));
  options("order", Object.keys(ORDERS));
  const hasTokens = data.groups.some(group => group.members.some(member => member.stretches));
  options("shading", hasTokens ? Object.keys(SHADINGS) : ["nothing"]);
  field("shading").value = hasTokens ? "version" : "nothing";
  const ranges = { training: rangeOf({ source: "training" }), evaluation: rangeOf({ source: "evaluation" }) };
  const shading = () => field("shading").value;
  const views = new Map(data.groups.map(group => [group, groupView(group, ranges[group.source], shading)]));

  const steps = () => {
    const source = field("source").value.split(":")[0], chosen = field("step").value;
    const found = [...new Set(data.groups.filter(group => group.source === source).map(group => group.step))].sort((a, b) => a - b);
    field("step").replaceChildren(new Option("all", ""), ...found.map(step => new Option(step, step)));
    field("step").value = found.map(String).includes(chosen) ? chosen : "";
  };
  const update = () => {
    const [source, set = ""] = field("source").value.split(": ");
    const step = field("step").value, needle = field("text").value.toLowerCase(), order = ORDERS[field("order").value];
    let found = data.groups.filter(group => group.source === source && (source === "training" || group.set === set)
      && (!step || String(group.step) === step) && KINDS[field("kind").value](group)
      && (!needle || [group.prompt, group.task, ...group.members.map(memberText)].some(text => text.toLowerCase().includes(needle))));
    if (order) found = found.slice().sort((a, b) => order(a) - order(b));
    list.replaceChildren(...found.slice(0, SHOWN_AT_ONCE).map(group => views.get(group)));
    const more = found.length > SHOWN_AT_ONCE ? `, of which the first ${SHOWN_AT_ONCE} are shown` : "";
    const leftOut = data.num_left_out ? ` ${data.num_left_out} more are in the files only.` : "";
    field("count").textContent = `${found.length} group${found.length === 1 ? "" : "s"}${more}.${leftOut}`;
  };
  field("source").addEventListener("change", () => { steps(); update(); });
  for (const name of ["step", "kind", "order"]) field(name).addEventListener("change", update);
  field("text").addEventListener("input", update);
  field("shading").addEventListener("change", () => { for (const view of views.values()) view.refill(); });
  steps();
  update();
  if (list.firstElementChild) list.firstElementChild.open = true;
}

// ---- A run that goes on: reload when its files have changed, unless someone is reading.

const live = document.getElementById("live");
if (live) {
  const stamp = live.dataset.stamp;
  let isReading = false;
  document.addEventListener("pointerdown", () => { isReading = true; });
  document.addEventListener("keydown", () => { isReading = true; });
  setInterval(async () => {
    const newest = await fetch("/stamp").then(answer => answer.text()).catch(() => stamp);
    if (newest === stamp) return;
    if (!isReading) location.reload();
    live.replaceChildren(element("button", { text: "New data: reload" }));
    live.firstElementChild.addEventListener("click", () => location.reload());
  }, 5000);
}
