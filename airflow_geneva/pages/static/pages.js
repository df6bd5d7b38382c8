"use strict";

// The theme that was chosen in Airflow, which frames these pages; else the system's.
const theme = (() => {
  try {
    return localStorage.getItem("theme");
  } catch {
    return null;
  }
})();
if (theme === "light" || theme === "dark") {
  document.documentElement.dataset.theme = theme;
}
if (window.parent !== window) {
  document.documentElement.dataset.framed = "";
}

// Times count on from the age that the server wrote, so that the browser's clock does not matter.
const ages = new WeakMap();

function sayAge(seconds) {
  for (const [unit, size] of [["day", 86400], ["hour", 3600]]) {
    if (seconds >= 2 * size) {
      return `${Math.floor(seconds / size)} ${unit}s`;
    }
  }
  return seconds >= 60 ? `${Math.round(seconds / 60)} min` : `${Math.round(seconds)} s`;
}

function tick() {
  for (const time of document.querySelectorAll("time[data-age]")) {
    if (!ages.has(time)) {
      ages.set(time, performance.now() / 1000 - Number(time.dataset.age));
    }
    time.textContent = sayAge(performance.now() / 1000 - ages.get(time)) + (time.dataset.after ?? "");
  }
  const away = document.getElementById("away");
  away.hidden = awaySince.size === 0;
  if (!away.hidden) {
    const age = sayAge((performance.now() - Math.min(...awaySince.values())) / 1000);
    const said = `Airflow does not answer: this page was last updated ${age} ago, and may be wrong since.`;
    if (away.textContent !== said) {
      away.textContent = said;
    }
  }
}

// A page is right again this many milliseconds after the server is.
const longestPause = 8000;
const longestWait = 30000;

// The parts of the page that could not be updated, with the time of their last update.
const awaySince = new Map();

// What has a data-live attribute is replaced by what lies there, until that has none itself.
async function follow(element) {
  const place = element.dataset.live;
  let updated = performance.now();
  while (element.dataset.live !== undefined) {
    await new Promise((resolve) => setTimeout(resolve, Number(element.dataset.after)));
    if (document.hidden) {
      continue;
    }
    let fresh = null;
    try {
      const answer = await fetch(place, { credentials: "same-origin", signal: AbortSignal.timeout(longestWait) });
      if (answer.status === 401 || answer.status === 403 || answer.status === 404) {
        location.reload();
        return;
      }
      if (answer.ok) {
        const holder = document.createElement("template");
        holder.innerHTML = await answer.text();
        fresh = holder.content.firstElementChild;
      }
    } catch {
      // The server is away for a moment.
    }
    if (fresh === null) {
      awaySince.set(place, updated);
      element.dataset.after = String(Math.min(2 * Math.max(Number(element.dataset.after), 1000), longestPause));
      continue;
    }
    updated = performance.now();
    awaySince.delete(place);
    if (element.dataset.then === "reload" && fresh.dataset.live === undefined) {
      location.reload();
      return;
    }
    const focused = element.contains(document.activeElement) ? document.activeElement.getAttribute("href") : null;
    const rolled = [...element.querySelectorAll(".scroll, .cards")].map((part) => [part.scrollLeft, part.scrollTop]);
    // A button that was pressed keeps what it says.
    for (const pressed of element.querySelectorAll("button[data-trigger]:disabled")) {
      const again = fresh.querySelector(`button[data-trigger="${CSS.escape(pressed.dataset.trigger)}"]`);
      again?.parentElement.replaceWith(pressed.parentElement);
    }
    element.replaceWith(fresh);
    drawGraph();
    for (const [index, part] of [...fresh.querySelectorAll(".scroll, .cards")].entries()) {
      [part.scrollLeft, part.scrollTop] = rolled[index] ?? [0, 0];
    }
    if (focused !== null) {
      fresh.querySelector(`a[href="${CSS.escape(focused)}"]`)?.focus({ preventScroll: true });
    }
    element = fresh;
  }
}

// The graph is drawn in the size that was chosen, also after an update.
let zoom = 1;

function drawGraph() {
  const graph = document.querySelector("svg.graph");
  if (graph !== null) {
    graph.setAttribute("width", graph.viewBox.baseVal.width * zoom);
    graph.setAttribute("height", graph.viewBox.baseVal.height * zoom);
  }
}

document.addEventListener("click", (event) => {
  const factor = event.target.closest("button[data-zoom]")?.dataset.zoom;
  const graph = document.querySelector("svg.graph");
  if (factor === undefined || graph === null) {
    return;
  }
  const frame = graph.parentElement;
  const before = zoom;
  const wanted = { fit: frame.clientWidth / graph.viewBox.baseVal.width, reset: 1 }[factor] ?? zoom * Number(factor);
  zoom = Math.min(Math.max(wanted, 0.2), factor === "fit" ? 1 : 4);
  // What is in the middle stays there.
  const middle = frame.scrollLeft + frame.clientWidth / 2;
  drawGraph();
  frame.scrollLeft = (middle * zoom) / before - frame.clientWidth / 2;
});

for (const element of document.querySelectorAll("[data-live]")) {
  follow(element);
}
setInterval(tick, 1000);

// Starts a run of the DAG that maintains a table, by Airflow's own API: it checks the user's rights, and logs who did it.
// A button without data-run cancels a job, by these pages, under the same rules.
// It takes JSON only, which no other site can send, and Airflow's cookie is not sent with another site's request.
// A button with a data-param sets that parameter of the DAG to true; without it the run would be an ordinary one.
document.addEventListener("click", async (event) => {
  const button = event.target.closest("button[data-trigger]");
  if (button === null) {
    return;
  }
  const said = button.nextElementSibling;
  button.disabled = true;
  const { param, details, run } = button.dataset;
  said.textContent = run === undefined ? "Canceling..." : "Starting...";
  try {
    if (param !== undefined) {
      const asked = await fetch(details, { credentials: "same-origin" });
      const dag = await asked.json().catch(() => ({}));
      if (!asked.ok || !Object.hasOwn(dag.params ?? {}, param)) {
        said.textContent = asked.ok
          ? `The DAG has no parameter ${param}: add it, and hand it to the task group.`
          : `Airflow does not show the DAG's parameters (status ${asked.status}).`;
        button.disabled = false;
        return;
      }
    }
    const answer = await fetch(button.dataset.trigger, {
      method: "POST",
      credentials: "same-origin",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify(run === undefined ? {} : { logical_date: null, ...(param === undefined ? {} : { conf: { [param]: true } }) }),
    });
    const found = await answer.json().catch(() => ({}));
    if (run === undefined && found.said !== undefined) {
      said.textContent = found.said;
      return;
    }
    if (answer.ok) {
      const link = document.createElement("a");
      link.href = run + encodeURIComponent(found.dag_run_id);
      link.textContent = "Started a run";
      said.replaceChildren(link);
      return;
    }
    said.textContent = typeof found.detail === "string" ? found.detail : `Airflow refused (status ${answer.status}).`;
  } catch {
    said.textContent = "Airflow cannot be reached.";
  }
  button.disabled = false;
});

// Airflow may not be framed by itself: its router is asked to go there, which it does without loading anything.
document.addEventListener("click", (event) => {
  const link = event.target.closest("a[data-airflow]");
  if (link === null || window.parent === window || event.ctrlKey || event.metaKey || event.shiftKey) {
    return;
  }
  try {
    window.parent.history.pushState(null, "", link.href);
    window.parent.dispatchEvent(new PopStateEvent("popstate", { state: null }));
    event.preventDefault();
  } catch {
    // Framed by another site: follow the link in this frame.
  }
});
