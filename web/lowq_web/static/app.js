// Adds to pages that are complete without it: live numbers, charts that move, times in the viewer's zone, select all.
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
    if (kind === "duration") element.classList.toggle("long", text.length > 7);
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
  // Touch screens and keyboards can't hover: a button shows all times exactly, and the choice is remembered.
  let exactly = false;
  try {
    exactly = localStorage.getItem("lowq-times") === "exact";
  } catch { /* it may be forbidden: then it is not remembered */ }
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
      const text = !at ? `times are ${zoneName}` : mark.textContent.includes(":") ? clockTime.format(at) : dayOf.format(at);
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
  const zone = document.querySelector("[data-times]");
  const choice = document.createElement("button");
  const choose = (exact) => {
    exactly = exact;
    choice.textContent = exactly ? "Show how long ago" : "Show exact times";
    tick();
  };
  choice.type = "button";
  choice.addEventListener("click", () => {
    choose(!exactly);
    try {
      localStorage.setItem("lowq-times", exactly ? "exact" : "");
    } catch { /* see above */ }
  });
  choose(exactly);
  zone.replaceChildren(`Times are in ${zoneName}, exact on hover. `, choice);

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

  // --- charts ---

  const charts = document.querySelector("[data-charts]");
  const plots = [];
  // Of the theme that is shown: the property itself names the colours of both.
  const colour = (name) => {
    const probe = document.createElement("i");
    probe.style.color = `var(${name})`;
    document.body.append(probe);
    const found = getComputedStyle(probe).color;
    probe.remove();
    return found;
  };

  const two = { hour: "2-digit", minute: "2-digit", hour12: false };
  // Seconds of a span, and what its axis steps by: never less than the labels show, or they would repeat.
  const lengths = { hour: 3600, day: 86400, month: 30 * 86400 };
  const timeSteps = {
    hour: [60, 300, 600, 900, 1800, 3600], day: [3600, 7200, 14400, 21600, 43200, 86400],
    month: [86400, 2 * 86400, 5 * 86400, 10 * 86400, 20 * 86400],
  };
  const onAxis = (span) => {
    const format = new Intl.DateTimeFormat(undefined, span === "month" ? { month: "short", day: "numeric" } : two);
    return (_, values) => {
      const labels = values.map((value) => format.format(new Date(value * 1000)));
      // A day that ends at a full hour begins at the same one: said once, at its end.
      return labels.map((label, index) => index < labels.lastIndexOf(label) ? "" : label);
    };
  };
  // Lengths of time that an axis steps by, and how its marks are written: round ones, in one unit.
  const minute = 60, hour = 3600, day = 86400;
  const steps = [
    0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, minute, 2 * minute, 5 * minute, 10 * minute, 20 * minute, 30 * minute,
    hour, 2 * hour, 4 * hour, 6 * hour, 12 * hour, day, 2 * day, 5 * day, 10 * day, 20 * day, 50 * day, 100 * day,
  ];
  const mark = (seconds) => {
    if (!seconds) return "0";
    for (const [unit, size] of [["d", day], ["h", hour], ["min", minute]]) {
      if (seconds >= size && seconds % size === 0) return `${seconds / size} ${unit}`;
    }
    if (seconds < minute) return `${Number(seconds.toFixed(1))} s`;
    // Between two units: 1:30 is a minute and a half below an hour, an hour and a half above.
    const [large, small] = seconds < hour ? [minute, 1] : [hour, minute];
    return `${Math.floor(seconds / large)}:${String(Math.round((seconds % large) / small)).padStart(2, "0")}${large === hour ? " h" : ""}`;
  };

  // The values at the pointer, touch or arrow-key position, in one line for both charts.
  const readout = charts && charts.querySelector("[data-readout]");
  const moment = charts && new Intl.DateTimeFormat(undefined, charts.dataset.span === "hour"
    ? { ...two, second: "2-digit" } : { ...two, month: "short", day: "numeric" });
  let readings = () => [];
  let pointedPlot = null;
  // Where the arrow keys have led to, until the focus goes: a mouse that leaves does not take that away.
  let led = null;
  const showReadings = (index) => {
    readout.replaceChildren();
    if (index === null || index === undefined) return;
    for (const [name, value] of readings(index)) {
      const [pair, strong] = [document.createElement("span"), document.createElement("b")];
      strong.textContent = value;
      pair.append(name, " ", strong);
      readout.append(pair, " ");
    }
  };
  const point = (place, plot) => {
    const to = (left) => plot.setCursor({ left, top: 0 });
    const touched = (event) => to(event.touches[0].clientX - plot.over.getBoundingClientRect().left);
    place.tabIndex = 0;
    place.setAttribute("role", "img");
    place.onkeydown = (event) => {
      const way = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (!way || event.ctrlKey || event.metaKey || event.altKey) return;
      event.preventDefault();
      const last = plot.data[0].length - 1;
      const index = Math.min(Math.max((plot.cursor.idx ?? last + (way > 0 ? 0 : 1)) + way, 0), last);
      const at = plot.data[0][index];  // by then it may have another index
      led = () => to(plot.valToPos(at, "x"));
      led();
    };
    place.onblur = () => {
      led = null;
      to(-10);
    };
    // After uPlot's own listener, which takes the cursors of both charts away.
    plot.over.addEventListener("mouseleave", () => led && led());
    plot.over.addEventListener("touchstart", touched, { passive: true });
    plot.over.addEventListener("touchmove", touched, { passive: true });
  };

  const draw = (place, series, data, write_, span, high) => {
    const axis = { stroke: colour("--soft"), grid: { stroke: colour("--line"), width: 1 }, ticks: { show: false }, font: "12px system-ui, sans-serif" };
    const label = place.querySelector("svg")?.getAttribute("aria-label") ?? place.getAttribute("aria-label");
    const options = {
      width: place.clientWidth, height: charts.classList.contains("slim") ? (high ? 136 : 112) : (high ? 206 : 96), padding: [10, 18, 0, 0],
      cursor: { y: false, drag: { x: false, y: false }, sync: { key: "charts" } }, legend: { show: false }, select: { show: false },
      scales: {
        // The whole span, also when little of it is known yet.
        x: { time: true, range: (_, first, last) => [Math.min(first ?? now(), (last ?? now()) - lengths[span]), last ?? now()] },
        y: { range: (_, low, high) => [0, high > 0 ? high * 1.1 : 1] },
      },
      axes: [
        { ...axis, size: 24, incrs: timeSteps[span], values: onAxis(span) },
        {
          ...axis, space: high ? 36 : 26, values: (_, values) => values.map(write_),
          ...(write_ === mark ? { incrs: steps } : {}),
          // As wide as its longest label.
          size: (_, values) => Math.max(44, 14 + 7 * Math.max(0, ...(values ?? []).map((text) => text.length))),
        },
      ],
      series: [{}, ...series.map((name) => ({
        stroke: colour(name), width: 1.75, points: { show: false }, spanGaps: false,
        fill: name === "--accent" ? colour("--accent-soft") : undefined,
      }))],
      hooks: { setCursor: [(plot) => {
        // Live numbers make both charts report their cursors; the chart without one has no values to show.
        if (plot.cursor.left >= 0) {
          pointedPlot = plot;
          showReadings(plot.cursor.idx);
        } else if (plot === pointedPlot) {
          showReadings(null);
        }
      }] },
    };
    place.replaceChildren();
    place.setAttribute("aria-label", label);
    const plot = new uPlot(options, data, place);
    plots.push([plot, place]);
    point(place, plot);
    return plot;
  };

  let live = null;
  const load = async () => {
    const { span, queue } = charts.dataset;
    const at = queue ? `queues/${encodeURIComponent(encodeURIComponent(queue))}/rates` : "rates";
    const answer = await fetch(`${root}/api/v1/${at}?span=${span}`);
    if (!answer.ok) return;
    const { rates } = await answer.json();
    const column = (name) => rates.map((item) => item[name]);
    const x = column("at");
    for (const [plot] of plots.splice(0)) plot.destroy();
    led = null;
    const [top, low] = [charts.querySelector("[data-plot=rates]"), charts.querySelector("[data-plot=lag]")];
    const data = [x, column("processed"), column("failed")];
    const lags = [[...x], column("lag")];
    readings = (index) => [
      ["", moment.format(new Date(data[0][index] * 1000))],
      ["processed", `${rate(data[1][index])}/s`],
      ["failed", `${rate(data[2][index])}/s`],
      ["latency", typeof lags[1][index] === "number" ? duration(lags[1][index]) : "-"],
    ];
    const known = [...data.slice(1), lags[1]].some((values) => values.some((value) => typeof value === "number"));
    // Nothing to draw: the page says what to do, until live figures say more than nothing.
    const bare = (yes) => {
      charts.classList.toggle("bare", yes);
      for (const part of charts.querySelectorAll("[data-plot], h3")) part.hidden = yes;
      for (const part of charts.querySelectorAll("[data-empty]")) part.hidden = !yes;
      readout.hidden = yes;
    };
    bare(!known);
    const sourceOf = (figures) => queue ? figures.queues[queue] : figures.total;
    const begin = () => {
      const upper = draw(top, ["--accent", "--danger"], data, rate, span, true);
      const lower = draw(low, ["--amber"], lags, mark, span, false);
      live = (figures) => {
        if (span !== "hour") return;
        const source = sourceOf(figures);
        if (!source || source.processed_rate === null) return;
        const add = (columns, values) => {
          if (columns[0].length && figures.at <= columns[0][columns[0].length - 1]) return false;
          columns.forEach((column, index) => column.push(values[index]));
          const first = figures.at - 3600;
          while (columns[0][0] < first) columns.forEach((column) => column.shift());
          return true;
        };
        if (add(data, [figures.at, source.processed_rate, source.failed_rate])) upper.setData(data);
        if (add(lags, [figures.at, source.lag])) lower.setData(lags);
        charts.dataset.points = data[0].length;
        charts.dataset.last = source.processed_rate;
      };
    };
    if (known) {
      begin();
      return;
    }
    live = (figures) => {
      const source = sourceOf(figures);
      if (span !== "hour" || !source || !(source.processed_rate > 0 || source.failed_rate > 0)) return;
      bare(false);
      begin();
      live(figures);
    };
  };
  if (charts && window.uPlot) {
    load().catch(() => {});
    addEventListener("resize", () => {
      for (const [plot, place] of plots) plot.setSize({ width: place.clientWidth, height: plot.height });
    });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => load().catch(() => {}));
    document.addEventListener("lowq:theme", () => load().catch(() => {}));
  }

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
    if (newer) tellNewer(figures);
    if (live) live(figures);
  });
})();
