// Adds to pages that are complete without it: live numbers and charts, times in the viewer's zone, select all.
"use strict";

(() => {
  const root = document.body.dataset.root;
  // A notice is shown once: its name is removed from the address.
  const here = new URL(location.href);
  if (here.searchParams.has("said")) {
    here.searchParams.delete("said");
    history.replaceState(history.state, "", here);
  }
  // The server's clock judges what is due; ours may differ.
  const ahead = Number(document.body.dataset.now) - Date.now() / 1000;
  const now = () => Date.now() / 1000 + ahead;

  // --- numbers, as the server writes them ---

  const short = (value) => {
    for (const [size, unit] of [[1e9, "G"], [1e6, "M"], [1e3, "K"]]) {
      if (Math.abs(value) >= size * 0.9995) {
        const scaled = value / size;
        return (Math.abs(scaled) < 9.95 ? scaled.toFixed(1).replace(".0", "") : scaled.toFixed(0)) + unit;
      }
    }
    return value.toFixed(0);
  };
  const rate = (value) => {
    if (value === null || value === undefined) return "-";
    if (value === 0 || value >= 10) return short(value);
    return value >= 1 ? value.toFixed(1) : String(Number(value.toPrecision(2)));
  };
  const duration = (seconds) => {
    if (seconds < 10) return seconds >= 0.05 ? `${seconds.toFixed(1)} s` : "0 s";
    let left = Math.round(seconds);
    const parts = [];
    for (const [unit, size] of [["d", 86400], ["h", 3600], ["min", 60], ["s", 1]]) {
      const count = Math.floor(left / size);
      left -= count * size;
      if (count) parts.push(`${count.toLocaleString("en")} ${unit}`);
      else if (parts.length) parts.push("");
      if (parts.length === 2) break;
    }
    return parts.filter(Boolean).join(" ");
  };
  const write = { rate, duration, count: short, text: (value) => value };
  const exact = (value) => value.toLocaleString("en", { maximumFractionDigits: 3 });

  const show = (element, value) => {
    const kind = element.dataset.kind || "count";
    const text = write[kind](value);
    if (element.textContent !== text) element.textContent = text;
    if (value !== null && kind !== "rate" && kind !== "text") element.title = exact(value) + (kind === "duration" ? " s" : "");
  };

  // --- times ---

  // All that there are at any time: pages are refreshed.
  const times = document.getElementsByTagName("time");
  const exactTime = new Intl.DateTimeFormat(undefined, {
    dateStyle: "medium", timeStyle: "long",
  });
  // In a column whose heading names the zone.
  const columnTime = new Intl.DateTimeFormat(undefined, { dateStyle: "medium", timeStyle: "medium" });
  const clockTime = new Intl.DateTimeFormat(undefined, { hour: "2-digit", minute: "2-digit", hour12: false });
  const dayOf = new Intl.DateTimeFormat(undefined, { month: "short", day: "numeric" });
  const zoneName = Intl.DateTimeFormat().resolvedOptions().timeZone;
  // Touch screens and keyboards can't hover: viewers may have all times exactly.
  let exactly = choices.get("times") === "exact";
  const tick = () => {
    for (const time of times) {
      const at = Date.parse(time.dateTime);
      if (Number.isNaN(at)) continue;
      const away = at / 1000 - now();
      time.title = exactTime.format(at);
      const ago = Math.abs(away) < 0.5 ? "now" : away > 0 ? `in ${duration(away)}` : `${duration(-away)} ago`;
      time.textContent = !exactly ? ago : time.closest("td") && time.closest("table").querySelector("[data-zone]") ? columnTime.format(at) : time.title;
    }
    // What the server has drawn has its times in UTC: they are in one zone with all others.
    for (const mark of document.querySelectorAll("[data-local]")) {
      const at = Number(mark.dataset.local) * 1000;
      const text = mark.textContent.includes(":") ? clockTime.format(at) : dayOf.format(at);
      if (mark.textContent !== text) mark.textContent = text;
    }
    for (const heading of document.querySelectorAll("[data-zone]")) {
      const named = heading.querySelector(".zone");
      if (!exactly && named) named.remove();
      else if (exactly && !named) {
        const added = document.createElement("small");
        added.className = "zone";
        added.textContent = ` ${zoneName}`;
        heading.append(added);
      }
    }
  };
  setInterval(tick, 1000);
  document.addEventListener("lowq:times", () => {
    exactly = choices.get("times") === "exact";
    tick();
  });
  document.querySelector("[data-times]").textContent = `Times are in ${zoneName}, exact on hover.`;
  tick();

  // --- select all ---

  const all = document.querySelector("[data-select-all]");
  const boxes = () => [...document.querySelectorAll("tbody:last-of-type input[name=id][type=checkbox]")];
  const onSelected = [...document.querySelectorAll("#jobs button[value$=' selected']")];
  if (all && !boxes().length) for (const button of onSelected) button.disabled = true;
  if (all && boxes().length) {
    const label = document.querySelector("[data-selected]");
    const count = () => {
      const chosen = boxes().filter((box) => box.checked).length;
      for (const button of onSelected) button.disabled = !chosen;
      label.textContent = chosen ? `${chosen} selected` : "select all";
      all.checked = chosen > 0 && chosen === boxes().length;
      all.indeterminate = chosen > 0 && !all.checked;
    };
    all.closest("label").hidden = false;
    all.addEventListener("change", () => {
      for (const box of boxes()) box.checked = all.checked;
      count();
    });
    document.addEventListener("change", (event) => {
      if (event.target.name === "id") count();
    });
    count();
    // Going back, a browser ticks again what was ticked.
    addEventListener("pageshow", count);
  }
  // Table bodies that were replaced by later ones must not be submitted.
  for (const body of document.querySelectorAll(".jobs tbody:not(:last-of-type)")) body.remove();

  // With a modifier: a letter alone would interfere with voice control.
  document.addEventListener("keydown", (event) => {
    if (event.key.toLowerCase() === "k" && (event.ctrlKey || event.metaKey) && !event.altKey && !event.shiftKey) {
      event.preventDefault();
      document.querySelector(".search input").select();
    }
  });

  // --- what is shown of a place in a picture: at the pointer, and where the arrow keys lead ---

  // `indexAt`: the place of an event in the picture, from 0, or none; `show`: shows one, or with null none.
  const explore = (picture, label, count, indexAt, show) => {
    // Whether the keys have led there: a mouse that leaves does not take that away.
    let [at, byKeys] = [null, false];
    const go = (index) => {
      at = index;
      show(index);
    };
    const point = (event) => {
      const index = indexAt(event);
      if (index === null) return;
      byKeys = false;
      go(index);
    };
    picture.tabIndex = 0;
    picture.setAttribute("role", "group");
    picture.setAttribute("aria-label", label);
    picture.addEventListener("pointermove", point);
    picture.addEventListener("pointerdown", point);
    // A finger that is lifted leaves, too; what it showed stays.
    picture.addEventListener("pointerleave", (event) => !byKeys && event.pointerType === "mouse" && go(null));
    picture.addEventListener("blur", () => {
      byKeys = false;
      go(null);
    });
    picture.addEventListener("keydown", (event) => {
      const way = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (!way || event.ctrlKey || event.metaKey || event.altKey) return;
      event.preventDefault();
      byKeys = true;
      go(at === null ? (way > 0 ? 0 : count() - 1) : Math.min(Math.max(at + way, 0), count() - 1));
    });
    return (index) => { at = index; };
  };

  const heat = document.querySelector("[data-heat]");
  if (heat) {
    const shards = () => [...heat.querySelectorAll("g")];
    const readout = document.querySelector("[data-heat-readout]");
    explore(heat, "Shards: the arrow keys lead through them", () => shards().length, (event) => {
      const shard = event.target.closest("g");
      return shard && shards().indexOf(shard);
    }, (index) => {
      for (const shard of shards()) shard.classList.toggle("shown", shard === shards()[index]);
      readout.textContent = index === null ? "" : shards()[index].querySelector("title").textContent;
    });
  }

  // --- charts: the values at the pointer, and newer ones ---

  const charts = document.querySelector("[data-charts]");
  let readings = [];
  // The moment that is shown, Unix time; and what moves the place that the keys go on from.
  let shown = null;
  let place = () => {};
  const showReadings = (index) => {
    const readout = charts.querySelector("[data-readout]");
    for (const cursor of charts.querySelectorAll(".cursor")) cursor.remove();
    readout.replaceChildren();
    const reading = readings[index];
    shown = reading ? reading[0] : null;
    if (!reading) return;
    const [at, processed, failed, latency] = reading;
    const hour = charts.dataset.span === "hour";
    const moment = new Intl.DateTimeFormat(undefined, {
      hour: "2-digit", minute: "2-digit", hour12: false, ...(hour ? { second: "2-digit" } : { month: "short", day: "numeric" }),
    });
    for (const [name, value] of [
      ["", moment.format(at * 1000)], ["processed", `${rate(processed)}/s`], ["failed", `${rate(failed)}/s`],
      ["latency", latency === null ? "-" : duration(latency)],
    ]) {
      const [pair, strong] = [document.createElement("span"), document.createElement("b")];
      strong.textContent = value;
      pair.append(name, " ", strong);
      readout.append(pair, " ");
    }
    for (const lines of charts.querySelectorAll(".lines")) {
      const cursor = document.createElementNS("http://www.w3.org/2000/svg", "line");
      const { width, height } = lines.viewBox.baseVal;
      const x = width * index / Math.max(readings.length - 1, 1);
      for (const [name, value] of Object.entries({ class: "cursor", x1: x, x2: x, y1: 0, y2: height })) cursor.setAttribute(name, value);
      lines.append(cursor);
    }
  };
  const prepare = () => {
    readings = JSON.parse(charts.dataset.readings);
    const found = shown === null ? -1 : readings.findIndex(([at]) => at >= shown);
    const index = found < 0 ? null : found;
    place(index);
    showReadings(index);
    tick();
  };
  if (charts) {
    place = explore(charts.querySelector("[data-plots]"), "Charts: the arrow keys lead through their values", () => readings.length, (event) => {
      const lines = event.target.closest("[data-plot]")?.querySelector(".lines").getBoundingClientRect();
      return lines ? Math.round(Math.min(Math.max((event.clientX - lines.left) / lines.width, 0), 1) * (readings.length - 1)) : null;
    }, showReadings);
    prepare();
  }

  // Nodes record what they perform every 10 s.
  const RECORDED = 10;
  let drawnAt = Date.now();
  const redraw = async () => {
    if (charts.dataset.span !== "hour" || Date.now() - drawnAt < RECORDED * 1000) return;
    drawnAt = Date.now();
    const answer = await fetch(`${root}/charts?${new URLSearchParams({ queue: charts.dataset.queue })}`);
    if (!answer.ok) return;
    const fresh = new DOMParser().parseFromString(await answer.text(), "text/html").querySelector("[data-charts]");
    if (!fresh) return;
    charts.dataset.readings = fresh.dataset.readings;
    for (const part of ["[data-empty]", "[data-plots]"]) {
      const [old, newer] = [charts.querySelector(part), fresh.querySelector(part)];
      old.hidden = newer.hidden;
      old.replaceChildren(...newer.childNodes);
    }
    prepare();
  };

  // --- live numbers; live.js brings them ---

  const cells = new Map();
  for (const element of document.querySelectorAll("[data-queue] [data-field]")) {
    const { queue } = element.closest("[data-queue]").dataset;
    if (!cells.has(queue)) cells.set(queue, []);
    cells.get(queue).push(element);
  }
  // How many failed jobs are due again is not sent: then these two stay as they were counted with the page.
  const derived = (values) => {
    if (values.retries && values.due) return {};
    const retrying = values.retries;
    return { retrying, scheduled: Math.max(values.length - values.due - retrying, 0) };
  };
  const paused = (queue, is) => {
    for (const name of document.querySelectorAll("tr[data-queue], h1[data-queue]")) {
      if (name.dataset.queue !== queue) continue;
      const place = name.querySelector("th") ?? name;
      const badge = [...place.querySelectorAll(".badge.amber")].find((item) => item.textContent === "paused");
      if (is && !badge) {
        const added = document.createElement("span");
        added.className = "badge amber";
        added.textContent = "paused";
        const link = place.querySelector("a");
        if (link) link.after(" ", added);
        else place.append(" ", added);
      } else if (!is && badge) {
        badge.remove();
        document.querySelector(".facts-line.pause")?.remove();
      }
    }
  };
  // Lists stay as they are while they are read, and say what they lack.
  const newer = document.querySelector("[data-newer]");
  const tellNewer = (figures) => {
    const { newer: counter, of, base, word } = newer.dataset;
    const values = of ? figures.queues[of] : figures.total;
    const count = values ? values[counter] - Number(base) : 0;
    if (count <= 0) return;
    const text = `${exact(count)} ${word}: `;
    if (newer.firstChild && newer.firstChild.data === text) return;
    const reload = document.createElement("a");
    reload.href = location.href;
    reload.textContent = "reload";
    if (newer.firstChild) newer.firstChild.data = text;
    else newer.append(text, reload);
    newer.hidden = false;
  };
  // How bad each is: the three levels of what is said first.
  const mark = () => {
    const verdict = document.querySelector("[data-levels]");
    if (!verdict) return;
    const levels = JSON.parse(verdict.dataset.levels);
    for (const marked of document.querySelectorAll("[data-mark]")) {
      const { queue } = marked.closest("[data-queue]")?.dataset ?? { queue: "" };
      const level = levels[`${marked.dataset.mark} ${queue}`];
      for (const name of ["red", "amber"]) marked.classList.toggle(name, level === name);
    }
  };
  const totals = document.querySelectorAll("[data-live^='total.']");
  document.addEventListener("lowq:figures", ({ detail: figures }) => {
    for (const element of totals) show(element, figures.total[element.dataset.live.slice(6)]);
    for (const [queue, elements] of cells) {
      const values = figures.queues[queue];
      if (!values) continue;
      const all = { ...values, ...derived(values) };
      for (const element of elements) if (all[element.dataset.field] !== undefined) show(element, all[element.dataset.field]);
    }
    for (const [queue, values] of Object.entries(figures.queues)) paused(queue, values.paused);
    mark();
    if (newer) tellNewer(figures);
    if (charts) redraw().catch(() => {});
  });
})();
