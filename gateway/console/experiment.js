// The experiment: how it goes, and the lists of both generations for the visitor who is followed.
"use strict";

const VERDICTS = { better: "good", worse: "bad", undecided: "" };
const CHART = { width: 600, height: 200 };

const percent = (share, digits = 1) => `${(100 * share).toFixed(digits)} %`;
const points = (difference) => (100 * difference).toFixed(2).replace("-", "−");
const minute = (time) => `${time.slice(0, 16).replace("T", " ")} UTC`;
const sentence = (text) => text[0].toUpperCase() + text.slice(1);

async function showExperiment() {
  const { answer } = await call("GET", "v1/experiment");
  const { experiment, arms, looks } = answer;
  byId("settings").textContent = experiment ? describe(experiment) : "No experiment runs.";
  byId("decision").textContent = sentence(answer.decision);
  byId("decision").className = { "rolled back": "bad", promoted: "good" }[experiment?.state] ?? VERDICTS[answer.verdict];
  const isTold = !answer.split || answer.decision.includes(answer.split);
  byId("split").textContent = isTold ? "" : `${sentence(answer.split)}.`;
  byId("split").className = answer.wrong_split ? "bad" : "quiet";
  const sampled = `Of one user in ${1 / answer.users_share}, because there are too many answers to judge at once.`;
  const captions = answer.users_share < 1 ? [element("caption", "quiet", sampled)] : [];
  byId("arms").replaceChildren(...(arms.length ? [...captions, ...tableOf(arms)] : []));
  byId("interval").replaceChildren(...(experiment && experiment.mode !== "shadow" ? drawLooks(experiment, looks) : []));
  for (const side of ["champion", "challenger"]) {
    byId(`${side}-generation`).textContent = experiment ? `(generation ${experiment[side]})` : "";
    byId(side).replaceChildren();
  }
  if (experiment && shown.visitor) await showBoth(experiment);
}

function describe({ name, mode, state, share, champion, challenger, started }) {
  const prefix = state === "running" ? "" : "No experiment runs. The last one was ";
  const part = state === "running" ? `, ${percent(share)} of the users` : "";
  return `${prefix}${name}: mode ${mode}, generation ${challenger} beside ${champion}${part}, since ${minute(started)}`;
}

function tableOf(arms) {
  const row = (tag, cells) => element("tr", "", ...cells.map((cell) => element(tag, "", cell)));
  const counted = (count, rate) => `${count} (${percent(rate, 2)})`;
  return [
    row("th", ["arm", "answers", "clicked", "converted"]),
    ...arms.map((arm) =>
      row("td", [arm.arm, arm.answers, counted(arm.clicked, arm.click_rate), counted(arm.converted, arm.conversion_rate)]),
    ),
  ];
}

function drawing(tag, attributes, ...children) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

// The first intervals may be far wider than the last: what is beyond four times the last one is cut off.
function drawLooks({ mode }, looks) {
  const known = looks.filter((look) => look.low !== null);
  if (!known.length) return [element("p", "quiet", "No interval yet: it takes 100 answers of each arm, and clicks.")];
  const farthest = (some) => Math.max(...some.flatMap((look) => [Math.abs(look.low), Math.abs(look.high)]));
  const reach = Math.min(farthest(known), 4 * farthest(known.slice(-1)));
  const [first, last] = [known[0], known.at(-1)].map((look) => Date.parse(look.time));
  const x = (look) => (last > first ? (CHART.width * (Date.parse(look.time) - first)) / (last - first) : CHART.width);
  const y = (value) => (CHART.height / 2) * (1 - Math.max(-1, Math.min(1, value / reach)));
  const placed = (some, bound) => some.map((look) => `${x(look).toFixed(1)},${y(look[bound]).toFixed(1)}`);
  const middle = { y1: CHART.height / 2, y2: CHART.height / 2 };
  const band = [...placed(known, "low"), ...placed(known.toReversed(), "high")].join(" ");
  const compared = mode === "interleave" ? "answers won by the challenger's items − by the champion's" : "click rates, challenger − champion";
  const { low, high } = known.at(-1);
  return [
    drawing(
      "svg",
      { viewBox: `0 0 ${CHART.width} ${CHART.height}`, role: "img", "aria-label": compared },
      drawing("polygon", { class: "band", points: band }),
      drawing("line", { class: "zero", x1: 0, x2: CHART.width, ...middle }),
      drawing("polyline", { class: "difference", points: placed(known, "difference").join(" ") }),
      drawing("text", { x: 6, y: 16 }, `+${points(reach)}`),
      drawing("text", { x: 6, y: CHART.height / 2 - 5 }, "0"),
      drawing("text", { x: 6, y: CHART.height - 6 }, `−${points(reach)}`),
    ),
    element("p", "quiet", `${sentence(compared)}: now ${points(low)} to ${points(high)} percentage points. The interval holds at every look.`),
    element("p", "quiet", `${minute(known[0].time)} – ${minute(known.at(-1).time)}`),
  ];
}

async function askGeneration(visitor, generation) {
  const query = new URLSearchParams({ ...visitor, generation });
  return (await call("GET", `v1/recommendations?${query}`)).answer.items;
}

async function showBoth(experiment) {
  const visitor = shown.visitor;
  const asks = [experiment.champion, experiment.challenger].map((generation) => askGeneration(visitor, generation));
  const asked = await Promise.allSettled(asks);
  if (visitor !== shown.visitor) return;
  const lists = asked.map((list) => list.value?.map((item) => item.id));
  for (const [side, other] of [[0, 1], [1, 0]]) {
    const { value: items, reason } = asked[side];
    const lines = items
      ? items.map((item, place) => compareLine(item, place, lists[other], side === 1))
      : [element("li", "bad", reason.message)];
    byId(["champion", "challenger"][side]).replaceChildren(...lines);
  }
}

// others: ids of the other list, undefined where that generation did not answer
function compareLine(item, place, others, isChallenger) {
  const before = others ? others.indexOf(item.id) : place;
  const climbed = before - place;
  const change = climbed > 0 ? `▲ ${climbed}` : climbed < 0 ? `▼ ${-climbed}` : "=";
  const node = line(place + 1, item, before < 0 ? "only here" : others && isChallenger ? change : "");
  if (before < 0) node.classList.add("new");
  return node;
}

byId("refresh").addEventListener("click", () => attempt(showExperiment));
