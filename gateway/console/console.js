// The console: follows one user or session. Titles, ids and messages come from the shop, so they are inserted as text, never as markup.
"use strict";

const STAGES = ["preprocess", "retrieve", "rank", "rerank"];
const HEALTH_EVERY_MS = 5000;
const byId = (id) => document.getElementById(id);
// visitor: { user: ID } or { session: ID }, a new object each time that one is followed
// address: the fragment that names the visitor
const shown = { view: "recommendations", visitor: null, items: [], address: "" };

function element(tag, className, ...children) {
  const node = document.createElement(tag);
  node.className = className;
  node.append(...children.map((child) => (child instanceof Node ? child : String(child))));
  return node;
}

function button(className, text, act) {
  const node = element("button", className, text);
  node.type = "button";
  node.addEventListener("click", () => attempt(act));
  return node;
}

const nameOf = (item) => item.title || String(item.id);
const milliseconds = (ms) => `${ms.toFixed(ms < 10 ? 1 : 0)} ms`;

// JavaScript would round ids beyond 53 bits: they become strings, which the gateway takes as well.
function parseAnswer(text) {
  const keepId = (token) => (/^-?\d+$/.test(token) && !Number.isSafeInteger(Number(token)) ? `"${token}"` : token);
  return JSON.parse(text.replace(/"(?:[^"\\]|\\.)*"|-?\d[\d.eE+-]*/g, keepId));
}

async function reach(path, options) {
  try {
    return await fetch(path, options);
  } catch {
    showState("the gateway does not answer", false);
    throw new Error("The gateway does not answer: it is down, or starts again. Try again, or see `python -m server status`.");
  }
}

// isTimed: whether the page says how long it took
async function call(method, path, body, isTimed = true) {
  const headers = { "content-type": "application/json" };
  if (byId("token").value) headers.authorization = `Bearer ${byId("token").value}`;
  const begun = performance.now();
  const response = await reach(path, { method, headers, body: body && JSON.stringify(body) });
  const answer = parseAnswer(await response.text());
  const ms = performance.now() - begun;
  if (isTimed) byId("latency").textContent = `${milliseconds(ms)} (${path.split("?")[0]})`;
  if (!response.ok && !("ready" in answer)) throw new Error(answer.error ? answer.error.message : `status ${response.status}`);
  return { answer, ms, timings: readTimings(response.headers.get("server-timing") ?? "") };
}

// "server;dur=4.2, gateway;dur=0.5" -> { server: 4.2, gateway: 0.5 }
function readTimings(header) {
  return Object.fromEntries([...header.matchAll(/(\w+);dur=([\d.]+)/g)].map(([, part, ms]) => [part, Number(ms)]));
}

async function attempt(act) {
  byId("message").textContent = "";
  try {
    await act();
  } catch (error) {
    byId("message").textContent = error.message;
  }
}

function line(rank, item, number, act) {
  const text = act ? button("item", nameOf(item), act) : element("span", "", nameOf(item));
  const node = element("li", "", element("span", "rank", rank), text, element("span", "number", number));
  node.dataset.item = item.id;
  node.title = `item ${item.id}`;
  return node;
}

// Answers about a visitor who is no longer followed are dropped.
async function showVisitor(visitor) {
  const [[kind, id]] = Object.entries(visitor);
  const { answer } = await call("GET", `v1/${kind}s/${encodeURIComponent(id)}`);
  if (visitor !== shown.visitor) return;
  byId("known").textContent = answer.known ? `${answer.events} counted events` : `This ${kind} is unknown: a cold start.`;
  byId("history").replaceChildren(
    ...answer.history.map((item, place) => line(place + 1, item, item.time.slice(0, 16).replace("T", " "))),
  );
}

async function showList(visitor, after) {
  const query = new URLSearchParams(visitor);
  if (after !== undefined) query.set("after", after);
  const { answer, ms, timings } = await call("GET", `v1/recommendations?${query}`);
  if (visitor !== shown.visitor) return ms;
  showWaterfall(ms, timings);
  const before = new Set(shown.items);
  shown.items = answer.items.map((item) => item.id);
  const lines = answer.items.map((item, place) => {
    const node = line(place + 1, item, item.score === null ? "popular" : item.score.toFixed(3), () => click(visitor, item, answer.request_id));
    node.append(button("small", "why?", () => explain(visitor, item.id)));
    if (before.size && !before.has(item.id)) node.classList.add("new");
    return node;
  });
  byId("list").replaceChildren(...lines);
  if (answer.degraded.length) {
    byId("message").textContent = `Degraded: ${answer.degraded.join(", ")}`;
    await showHealth(false);
  }
  if (byId("generation").textContent !== String(answer.generation)) await showQuality();
  return ms;
}

// Each bar begins where the one above ends. What is left of the server's time is the way to it, and waiting there.
function showWaterfall(ms, { server, ...timings }) {
  const stages = STAGES.filter((stage) => stage in timings).map((stage) => [stage, timings[stage]]);
  const others = Object.entries(timings).filter(([part]) => !STAGES.includes(part));
  const sum = (parts) => parts.reduce((total, [, spent]) => total + spent, 0);
  const waited = server === undefined ? [] : [[stages.length ? "way to the server" : "server", Math.max(server - sum(stages), 0)]];
  const inside = [...waited, ...stages, ...others];
  const whole = Math.max(ms, sum(inside));
  let begun = 0;
  const rows = [["page and network", whole - sum(inside)], ...inside].map(([part, spent]) => {
    const bar = element("div", "part");
    bar.style.marginLeft = `${(100 * begun) / whole}%`;
    bar.style.width = `${(100 * spent) / whole}%`;
    begun += spent;
    return element("tr", "", element("td", "", part), element("td", "", milliseconds(spent)), element("td", "bar", bar));
  });
  byId("waterfall").replaceChildren(...rows);
}

async function showQuality() {
  const { answer } = await call("GET", "v1/generation");
  byId("generation").textContent = answer.generation;
  const { ndcg_at_10: ndcg, recall_at_20: recall, validation_requests: requests } = answer.quality;
  byId("quality").textContent = ndcg === undefined ? "not measured" : `NDCG@10 ${ndcg.toFixed(3)}, Recall@20 ${recall.toFixed(3)}`;
  byId("quality").title = `the ranker among the retrieved items of ${requests ?? 0} validation requests; ${answer.dataset}, ${answer.log.events} events, ${answer.log.first} to ${answer.log.last}`;
}

async function click(visitor, item, requestId) {
  const before = shown.items.join();
  const event = { ...visitor, item: item.id, request_id: requestId };
  const { answer, ms } = await call("POST", "v1/events", event);
  const listMs = await showList(visitor, answer.sequence);
  if (visitor !== shown.visitor) return;
  const changed = before === shown.items.join() ? "the list is as it was" : "the list changed";
  byId("change").textContent = `${nameOf(item)}: durable after ${milliseconds(ms)}, ${changed} ${milliseconds(listMs)} later.`;
  await showVisitor(visitor);
}

async function explain(visitor, item) {
  byId("item").value = item;
  const query = new URLSearchParams({ ...visitor, item });
  const path = `v1/items/${encodeURIComponent(item)}`;
  const { answer: known } = await call("GET", path);
  const { answer } = await call("GET", `v1/explain?${query}`);
  if (visitor !== shown.visitor) return;
  const rows = answer.places.map((place) => {
    const bar = document.createElement("meter");
    bar.max = 1;
    bar.value = place.rank === null ? 0 : 1 - (place.rank - 1) / Math.max(place.of, 1);
    const cells = [place.stage, place.rank === null ? "–" : `${place.rank} of ${place.of}`, place.score === null ? "–" : place.score.toFixed(4)];
    return element("tr", "", ...cells.map((cell) => element("td", "", cell)), element("td", "bar", bar));
  });
  const moved = answer.rules.filter((move) => move.rank_before !== move.rank_after);
  const facts = [known.category && `Category ${known.category}`, known.popularity_rank && `number ${known.popularity_rank} by what sold lately`];
  byId("why").replaceChildren(
    element("p", answer.shown ? "good" : "bad", `${nameOf(answer.item)}: ${answer.why}`),
    ...(answer.experiment ? [element("p", "bad", answer.experiment)] : []),
    element("table", "", ...rows),
    ...moved.map((move) => element("p", "quiet", `Rule ${move.rule}: place ${move.rank_before ?? "–"} → ${move.rank_after ?? "out"}`)),
    element("p", "quiet", answer.source.length ? `Proposed by: ${answer.source.join(", ")}` : "No source proposed it."),
    ...answer.because.map((cause) => element("p", "quiet", `because of ${nameOf(cause)} (+${cause.weight.toFixed(3)})`)),
    element("p", "quiet", facts.filter(Boolean).join(", ")),
  );
  const { answer: alike } = await call("GET", `${path}/similar?k=8`);
  if (visitor !== shown.visitor) return;
  byId("similar").replaceChildren(
    ...alike.items.map((other, place) => {
      const source = other.source === "bought_together" ? "bought together" : "alike";
      return line(place + 1, other, `${source} ${other.score.toFixed(2)}`, () => explain(visitor, other.id));
    }),
  );
}

function showState(text, isGood) {
  byId("health").textContent = text;
  byId("health").className = isGood ? "good" : "bad";
}

async function showHealth(isTimed = true) {
  const { answer } = await call("GET", "readyz", undefined, isTimed);
  const moved = answer.servers.every((server) => !server.ready || server.generation === (answer.pinned ?? server.generation));
  const ready = moved ? "ready" : `ready, but generation ${answer.pinned} is pinned`;
  showState(answer.ready ? ready : "away: popular items answer", answer.ready && moved);
}

async function follow(visitor) {
  Object.assign(shown, { visitor, items: [], address: `#${new URLSearchParams(visitor)}` });
  location.hash = shown.address;
  for (const id of ["known", "history", "list", "why", "similar", "change", "waterfall"]) byId(id).replaceChildren();
  await showHealth();
  await showQuality();
  await showView();
}

async function showView() {
  if (shown.view === "experiment") {
    await showExperiment();
  } else if (shown.visitor) {
    const visitor = shown.visitor;
    await showVisitor(visitor);
    await showList(visitor);
  }
}

function turnTo(view) {
  shown.view = view;
  for (const name of ["recommendations", "experiment"]) {
    byId(name).hidden = name !== view;
    byId(`to-${name}`).setAttribute("aria-pressed", name === view);
  }
  attempt(showView);
}

byId("follow").addEventListener("submit", (event) => {
  event.preventDefault();
  attempt(() => follow({ [byId("kind").value]: byId("visitor").value.trim() }));
});
byId("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  attempt(() => explain(shown.visitor, byId("item").value.trim()));
});
for (const name of ["recommendations", "experiment"]) byId(`to-${name}`).addEventListener("click", () => turnTo(name));

function followAddress() {
  const address = new URLSearchParams(location.hash.slice(1));
  byId("kind").value = address.has("session") ? "session" : "user";
  byId("visitor").value = address.get(byId("kind").value) ?? "";
  if (byId("visitor").value) byId("follow").requestSubmit();
  else attempt(showHealth);
}

// "Back", "forward" and a changed address; not what `follow` itself has written.
window.addEventListener("hashchange", () => location.hash === shown.address || followAddress());
// A server that fails, or comes back, is told without a click.
setInterval(() => document.hidden || showHealth(false).catch(() => {}), HEALTH_EVERY_MS);
followAddress();
