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
const versionColor = (stretch, index, member) => stalenessColor(trainedAt(member) - stretch.versions[index]);

function diverging(value, full) {
  if (value === null || value === undefined) return "";
  const strength = Math.min(0.65, 0.65 * Math.abs(value) / full);
  return value > 0 ? `rgba(5, 150, 105, ${strength})` : `rgba(220, 38, 38, ${strength})`;
}

const advantageColor = (stretch, index) => diverging(stretch.advantages?.[index], 2);
const difference = (stretch, index) => (stretch.trained?.[index] ?? null) === null ? null : stretch.trained[index] - stretch.logprobs[index];

// Of a token: its style for a shading.
const SHADINGS = {
  "nothing": () => ({}),
  "version": (stretch, index, member) => ({ background: `${versionColor(stretch, index, member)}44` }),
  "advantage": (stretch, index) => ({ background: advantageColor(stretch, index) }),
  "advantage, underlined by version": (stretch, index, member) =>
    ({ background: advantageColor(stretch, index), boxShadow: `inset 0 -2px ${versionColor(stretch, index, member)}` }),
  "logprob": (stretch, index) => ({ background: `rgba(225, 29, 72, ${Math.min(0.7, -(stretch.logprobs[index] || 0) / 6)})` }),
  "logprob difference": (stretch, index) => ({ background: diverging(difference(stretch, index), 0.5) }),
};
const shading = document.getElementById("browse-shading");
const placeOf = new WeakMap(); // token -> [stretch, index, member]

function shade(token) {
  Object.assign(token.style, { background: "", boxShadow: "" }, SHADINGS[shading.value](...placeOf.get(token)));
}

function tokenTitle(stretch, index) {
  const lines = [`version ${stretch.versions[index]}`, `logprob ${short(stretch.logprobs[index])} when sampled`];
  if (stretch.trained && stretch.trained[index] !== null) lines.push(`${short(stretch.trained[index])} when trained`);
  if (stretch.advantages && stretch.advantages[index] !== null) lines.push(`advantage ${signed(stretch.advantages[index])}`);
  return lines.join("\n");
}

function tokenView(stretch, index, member) {
  const view = element("span", { className: "token", text: stretch.texts[index], title: tokenTitle(stretch, index) });
  placeOf.set(view, [stretch, index, member]);
  shade(view);
  return view;
}

const counted = (number, noun) => `${number.toLocaleString("en")} ${noun}${number === 1 ? "" : "s"}`;
const textOf = turn => (turn.texts ? turn.texts.join("") : turn.text);
const oneLine = text => text.slice(0, 200).replace(/\s+/g, " ");
const isLong = text => text.length > 280 || text.split("\n").length > 7;

// Long tool calls in what the policy said, as [begin, end] in characters; other families' calls are shown in full.
const CALL = /(?:<[|｜]?(?:\w+:)?tool[_▁]calls?(?:_section)?(?:[_▁]begin)?[|｜]?>|\[TOOL_CALLS\]|<\|python_tag\|>)[^]*?(?:<\/(?:\w+:)?tool_calls?>|<[|｜]tool[_▁]calls?(?:_section)?[_▁]end[|｜]>|$)/g;
const longCalls = text => [...text.matchAll(CALL)].map(found => [found.index, found.index + found[0].length]).filter(([begin, end]) => end - begin > 160);

// Turns of an episode as [seconds of sampling, seconds of the environment after it].
function secondsOf(said) {
  const pairs = [];
  for (const turn of said) {
    if (turn.role === "policy") pairs.push([turn.seconds || 0, 0]);
    else if (turn.role === "environment" && pairs.length) pairs.at(-1)[1] += turn.seconds || 0;
  }
  return pairs;
}

function timesView(pairs, longest) {
  const view = element("span", { className: "times" }, pairs.flatMap(pair => ["sampling", "environment"].map((kind, index) =>
    element("i", { className: `${kind}-time`, style: { width: `${longest > 0 ? 100 * pair[index] / longest : 0}%` } }))));
  view.setAttribute("aria-hidden", "true"); // the figures are beside it
  return view;
}

const headView = facts => element("span", { className: "who" }, facts.filter(Boolean).map(one => (one instanceof Element ? one : element("span", { text: one }))));
const tokensIn = turn => counted(turn.num_tokens, "token") + (turn.seconds > 0 ? ` in ${short(turn.seconds)} s` : "");
const shownOf = turn => turn.num_left_out > 0 && (turn.num_left_out < turn.num_tokens ? `${counted(turn.num_left_out, "token")} not shown` : "in the file only");

function rangeText(values, show) {
  const low = Math.min(...values), high = Math.max(...values);
  return show(low) === show(high) ? show(low) : `${show(low)} … ${show(high)}`;
}

function foldView(head, preview, said) {
  return element("details", { className: "fold" }, [element("summary", {}, [head, element("span", { className: "preview" }, preview)]), ...said]);
}

// What the environment said, or the prompt of a thread.
function observationView(turn) {
  const text = textOf(turn).replace(/^\n+/, ""), head = headView([turn.role, tokensIn(turn), shownOf(turn)]);
  // A prompt is known by its end: what comes first is the same for all threads.
  const preview = turn.role === "prompt" ? `… ${oneLine(text.slice(-160))}` : oneLine(text);
  const said = isLong(text) ? foldView(head, [preview], [text]) : [head, text];
  return element("div", { className: `turn ${turn.role}` }, [said].flat());
}

function turnView(turn, member, number, times) {
  // A call is one line until it is opened. Text without tokens is cut where calls begin and end.
  const text = textOf(turn), calls = longCalls(text), edges = [0, ...calls.flat(), text.length];
  const pieces = turn.texts || edges.slice(1).map((edge, index) => text.slice(edges[index], edge));
  const show = index => (turn.versions ? tokenView(turn, index, member) : pieces[index]);
  const runs = [];
  let end = 0;
  pieces.forEach((piece, index) => {
    const begin = end;
    end += piece.length;
    const call = calls.find(([from, to]) => begin < to && end > from);
    if (!runs.length || runs.at(-1).call !== call) runs.push({ call, indices: [] });
    runs.at(-1).indices.push(index);
  });
  const said = runs.flatMap(({ call, indices }) => {
    if (!call) return indices.map(show);
    const size = turn.versions ? counted(indices.length, "token") : `${call[1] - call[0]} characters`;
    const preview = turn.versions ? indices.slice(0, 40).map(show) : [oneLine(text.slice(...call))];
    return [foldView(headView(["tool call", size]), preview, indices.map(show))];
  });
  const advantages = (turn.advantages || []).filter(one => one !== null);
  const head = headView([
    times, number ? `turn ${number}` : "policy", tokensIn(turn),
    turn.versions?.length && rangeText(turn.versions, version => `v${version}`),
    advantages.length && `advantage ${rangeText(advantages, signed)}`,
    turn.finish_reason === "length" && "cut off", turn.interruptions > 0 && `${turn.interruptions} times interrupted`,
    shownOf(turn),
  ]);
  const view = element("div", { className: "turn policy" }, [head, ...said]);
  view.tabIndex = -1; // where links lead
  return view;
}

// Turns and observations of one thread. `turns` gets the view of each turn, `afterTurn` makes what follows it.
function saidViews(said, { member, slowest, thread, turns = new Map(), afterTurn = () => [] }) {
  const pairs = secondsOf(said);
  const views = said.flatMap(one => {
    if (one.role !== "policy") return [observationView(one)];
    const number = turns.size + 1;
    turns.set(number, turnView(one, member, thread && number, thread && slowest > 0 && timesView([pairs[number - 1]], slowest)));
    return [turns.get(number), ...afterTurn(number)];
  });
  const numMore = (thread?.num_turns ?? 0) - turns.size;
  return numMore > 0 ? [...views, noteView(`${counted(numMore, "more turn")} in the file only.`)] : views;
}

const noteView = (...said) => element("div", { className: "note" }, said);

function linkView(text, go) {
  const view = element("button", { className: "link", text });
  view.type = "button";
  view.addEventListener("click", go);
  return view;
}

function secondsText({ sampling_s: sampling, environment_s: environment }) {
  return [sampling > 0 && `${short(sampling)} s sampling`, environment > 0 && `${short(environment)} s environment`].filter(Boolean).join(" + ");
}

// The threads of an episode: a fork is below the thread that it continues, and begins where it differs from it.
function threadTree(member, slowest) {
  const opened = new Map(), items = new Map(), tree = element("ul", { className: "threads" });
  const longest = Math.max(...member.threads.map(one => one.sampling_s + one.environment_s));
  const open = name => {
    const { view, fill } = opened.get(name);
    fill();
    view.open = true;
  };
  const goTo = (name, number) => {
    open(name);
    const { view, turns } = opened.get(name), target = turns.get(number) || view.querySelector("summary");
    target.scrollIntoView({ block: "center" });
    target.focus({ preventScroll: true });
  };
  for (const thread of member.threads) {
    const said = (thread.trained ? member.stretches || member.turns : member.side_turns).filter(one => one.thread === thread.name);
    const after = thread.after_turn ? ` after turn ${thread.after_turn}` : "";
    const facts = [!thread.trained && "not trained", thread.fork_of && `fork of ${thread.fork_of}${after}`,
                   counted(thread.num_turns, "turn"), counted(thread.num_tokens, "token"), secondsText(thread),
                   member.parts[`thread/${thread.name}`] !== undefined && `reward ${short(member.parts[`thread/${thread.name}`])}`];
    const view = element("details", { className: `thread${thread.trained ? "" : " untrained"}` }, [element("summary", {}, [
      timesView(secondsOf(said), longest),
      element("span", { className: "name", text: thread.name }),
      ...facts.filter(Boolean).map(text => element("span", { text })),
    ])]);
    const turns = new Map();
    const afterTurn = number => member.threads.filter(one => one.fork_of === thread.name && one.after_turn === number)
      .map(one => noteView(linkView(`${one.name} continues from here, too`, () => goTo(one.name, 0))));
    const fill = () => {
      if (view.querySelector(".text")) return;
      const body = element("div", { className: "text" });
      if (thread.fork_of) {
        const where = linkView(`${thread.fork_of}${after}`, () => goTo(thread.fork_of, thread.after_turn));
        const again = thread.num_own ? "." : ": the same request was answered again.";
        body.append(noteView("Continues ", where, ` (${counted(thread.num_shared, "token")}, not repeated here)${again}`));
      }
      body.append(...saidViews(said, { member, slowest, thread, turns, afterTurn: thread.trained ? afterTurn : () => [] }));
      body.tabIndex = 0;
      body.setAttribute("role", "region");
      body.setAttribute("aria-label", `thread ${thread.name}`);
      view.append(body);
    };
    view.addEventListener("toggle", fill);
    opened.set(thread.name, { view, turns, fill });
    const item = element("li", {}, [view]), above = items.get(thread.fork_of);
    if (above && !above.querySelector(":scope > ul")) above.append(element("ul"));
    (above ? above.querySelector(":scope > ul") : tree).append(item);
    items.set(thread.name, item);
  }
  open(member.threads[0].name);
  return tree;
}

function chip(member, range) {
  const isHigh = member.reward !== null && range.high > range.low && member.reward >= (range.low + range.high) / 2;
  const kind = member.reward === null || range.high <= range.low ? "" : isHigh ? "high" : "low";
  return element("span", { className: `chip ${kind}`, text: short(member.reward), title: member.name });
}

const sumOf = (threads, key) => threads.reduce((sum, thread) => sum + thread[key], 0);

function memberView(member, range) {
  const total = member.spans.reduce((sum, [, count]) => sum + count, 0) || 1;
  const bars = member.spans.map(([version, count]) => element("i", {
    style: { width: `${100 * count / total}%`, background: stalenessColor(trainedAt(member) - version) },
    title: `version ${version}: ${count} tokens, staleness ${trainedAt(member) - version}`,
  }));
  const trained = member.threads.filter(thread => thread.trained), untrained = member.threads.filter(thread => !thread.trained);
  const facts = [
    member.name,
    member.versus_group !== null && `${signed(member.versus_group)} in its group`,
    ...(Object.keys(member.parts).length > 1 ? Object.entries(member.parts).map(([name, value]) => `${name} ${short(value)}`) : []),
    trained.length > 0 && counted(sumOf(trained, "num_turns"), "turn") + (trained.length > 1 ? ` in ${trained.length} threads` : ""),
    untrained.length > 0 && `${counted(sumOf(untrained, "num_turns"), "turn")} not trained`,
    counted(member.num_tokens, "token"),
    secondsText({ sampling_s: sumOf(member.threads, "sampling_s"), environment_s: sumOf(member.threads, "environment_s") }),
    member.spans.map(([version, count]) => `v${version}·${count}`).join(" "),
    member.end === "length" ? "cut off" : member.end,
    member.retried_after && `retried after: ${member.retried_after}`,
    member.num_left_out > 0 && `${counted(member.num_left_out, "token")} not shown`,
    member.num_threads_left_out > 0 && `${counted(member.num_threads_left_out, "thread")} not shown`,
  ].filter(Boolean);
  const head = element("div", { className: "head" }, [chip(member, range), element("span", { className: "spans" }, bars),
                                                     ...facts.map(text => element("span", { text }))]);
  const said = member.stretches || member.turns;
  const slowest = Math.max(...[...secondsOf(said), ...secondsOf(member.side_turns)].map(([sampling, environment]) => sampling + environment));
  const text = member.threads.length > 1 ? threadTree(member, slowest)
    : element("div", { className: "text" }, saidViews(said, { member, slowest, thread: member.threads[0] }));
  return element("div", { className: "member" }, [head, text]);
}

function rangeOf(group) {
  const all = data.groups.filter(one => one.source === group.source).flatMap(one => one.members.map(member => member.reward)).filter(one => one !== null);
  return { low: Math.min(...all), high: Math.max(...all) };
}

function groupView(group, range) {
  const what = group.source === "training" ? `step ${group.step} · group ${group.group}` : `evaluation at v${group.step}${group.set && ` · ${group.set}`}`;
  const view = element("details", { className: "group" }, [element("summary", {}, [
    element("span", { className: "what", text: what }),
    element("span", { className: "begin", text: `${group.task}  ${group.prompt.slice(-160).replaceAll("\n", " ")}`, title: group.task }),
    element("span", { className: "chips" }, group.members.map(member => chip(member, range))),
  ])]);
  view.addEventListener("toggle", () => {
    if (!view.open || view.querySelector(".body")) return;
    view.append(element("div", { className: "body" }, [
      element("div", { className: "text prompt", text: group.prompt }),
      ...group.members.map(member => memberView(member, range)),
    ]));
  });
  return view;
}

const memberText = member => [...(member.stretches || member.turns), ...member.side_turns].map(textOf).join("");
const KINDS = {
  "all": () => true,
  "mixed rewards": group => new Set(group.members.map(member => member.reward)).size > 1,
  "equal rewards": group => new Set(group.members.map(member => member.reward)).size === 1,
  "cut off": group => group.members.some(member => member.end === "length"),
  "retried": group => group.members.some(member => member.retried_after),
  "over two versions or more": group => group.members.some(member => member.spans.length > 1),
  "several threads": group => group.members.some(member => member.threads.length > 1),
};
const secondsOfMember = member => sumOf(member.threads, "sampling_s") + sumOf(member.threads, "environment_s");
const ORDERS = {
  "newest first": null,
  "lowest reward first": group => Math.min(...group.members.map(member => member.reward ?? 0)),
  "highest reward first": group => -Math.max(...group.members.map(member => member.reward ?? 0)),
  "longest first": group => -Math.max(...group.members.map(member => member.num_tokens)),
  "slowest first": group => -Math.max(...group.members.map(secondsOfMember)),
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
  shading.value = hasTokens ? "version" : "nothing";
  field("times").hidden = !data.groups.some(group => group.members.some(member => secondsOfMember(member) > 0));
  const ranges = { training: rangeOf({ source: "training" }), evaluation: rangeOf({ source: "evaluation" }) };
  const views = new Map(data.groups.map(group => [group, groupView(group, ranges[group.source])]));

  const steps = () => {
    const source = field("source").value.split(":")[0], chosen = field("step").value;
    const found = [...new Set(data.groups.filter(group => group.source === source).map(group => group.step))].sort((a, b) => a - b);
    field("step").replaceChildren(new Option("all", ""), ...found.map(step => new Option(step, step)));
    field("step").value = found.map(String).includes(chosen) ? chosen : "";
  };
  const update = () => {
    const [source, set = ""] = field("source").value.split(/: (.*)/s);  // a set may be named "math: hard"
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
  shading.addEventListener("change", () => { for (const view of views.values()) view.querySelectorAll(".token").forEach(shade); });
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
