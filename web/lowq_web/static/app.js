// Adds to pages that are complete without it: live numbers, charts that move, times in the viewer's zone, select all.
"use strict";

(() => {
  const root = document.body.dataset.root;
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
  const write = { rate, duration, count: short };
  const exact = (value) => value.toLocaleString("en", { maximumFractionDigits: 3 });

  const show = (element, value) => {
    const kind = element.dataset.kind || "count";
    const text = write[kind](value);
    if (element.textContent !== text) element.textContent = text;
    if (value !== null && kind !== "rate") element.title = exact(value) + (kind === "duration" ? " s" : "");
  };

  // --- times ---

  // All that there are at any time: pages are refreshed.
  const times = document.getElementsByTagName("time");
  const exactTime = new Intl.DateTimeFormat(undefined, {
    dateStyle: "medium", timeStyle: "long",
  });
  const tick = () => {
    for (const time of times) {
      const at = Date.parse(time.dateTime);
      if (Number.isNaN(at)) continue;
      const away = at / 1000 - now();
      time.title = exactTime.format(at);
      time.textContent = Math.abs(away) < 0.5 ? "now" : away > 0 ? `in ${duration(away)}` : `${duration(-away)} ago`;
    }
  };
  tick();
  setInterval(tick, 1000);

  // --- select all ---

  const all = document.querySelector("[data-select-all]");
  const boxes = () => [...document.querySelectorAll("tbody:last-of-type input[name=id][type=checkbox]")];
  if (all && boxes().length) {
    const told = document.querySelector("[data-selected]");
    const count = () => {
      const chosen = boxes().filter((box) => box.checked).length;
      told.textContent = chosen ? `${chosen} selected` : "select all";
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
  }
  // Table bodies that were replaced by later ones must not be sent along.
  for (const body of document.querySelectorAll(".jobs tbody:not(:last-of-type)")) body.remove();

  document.addEventListener("keydown", (event) => {
    const typing = /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName);
    if (event.key === "/" && !typing && !event.ctrlKey && !event.metaKey && !event.altKey) {
      event.preventDefault();
      document.querySelector(".search input").focus();
    }
  });

  // --- charts ---

  const charts = document.querySelector("[data-charts]");
  const plots = [];
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  const two = { hour: "2-digit", minute: "2-digit", hour12: false };
  const onAxis = (span) => {
    const format = new Intl.DateTimeFormat(undefined, span === "month" ? { month: "short", day: "numeric" } : two);
    return (_, values) => values.map((value) => format.format(new Date(value * 1000)));
  };

  const draw = (place, series, data, write_, span, high) => {
    const axis = { stroke: colour("--soft"), grid: { stroke: colour("--line"), width: 1 }, ticks: { show: false }, font: "12px system-ui, sans-serif" };
    const options = {
      width: place.clientWidth, height: high ? (charts.classList.contains("slim") ? 136 : 206) : 96, padding: [10, 18, 0, 0],
      cursor: { y: false, drag: { x: false, y: false } }, legend: { show: false }, select: { show: false },
      scales: { x: { time: true }, y: { range: (_, low, high) => [0, Math.max(high * 1.1, 1e-9) || 1] } },
      axes: [
        { ...axis, size: 24, values: onAxis(span) },
        { ...axis, size: 56, space: high ? 36 : 26, values: (_, values) => values.map(write_) },
      ],
      series: [{}, ...series.map((name) => ({
        stroke: colour(name), width: 1.75, points: { show: false }, spanGaps: false,
        fill: name === "--accent" ? colour("--accent-soft") : undefined,
      }))],
    };
    place.replaceChildren();
    const plot = new uPlot(options, data, place);
    plots.push([plot, place]);
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
    const [top, low] = [charts.querySelector("[data-plot=rates]"), charts.querySelector("[data-plot=lag]")];
    const data = [x, column("processed"), column("failed")];
    const lags = [[...x], column("lag")];
    const upper = draw(top, ["--accent", "--danger"], data, rate, span, true);
    const lower = low.clientWidth ? draw(low, ["--amber"], lags, duration, span, false) : null;
    live = (figures) => {
      if (span !== "hour") return;
      const source = queue ? figures.queues[queue] : figures.total;
      if (!source || source.processed_rate === null) return;
      const add = (columns, values) => {
        if (columns[0].length && figures.at <= columns[0][columns[0].length - 1]) return false;
        columns.forEach((column, index) => column.push(values[index]));
        const first = figures.at - 3600;
        while (columns[0][0] < first) columns.forEach((column) => column.shift());
        return true;
      };
      if (add(data, [figures.at, source.processed_rate, source.failed_rate])) upper.setData(data);
      if (lower && add(lags, [figures.at, source.lag])) lower.setData(lags);
      charts.dataset.points = data[0].length;
      charts.dataset.last = source.processed_rate;
    };
  };
  if (charts && window.uPlot) {
    load().catch(() => {});
    addEventListener("resize", () => {
      for (const [plot, place] of plots) plot.setSize({ width: place.clientWidth, height: plot.height });
    });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => load().catch(() => {}));
  }

  // --- live numbers; live.js brings them ---

  const cells = new Map();
  for (const element of document.querySelectorAll("tr[data-queue] [data-field]")) {
    const queue = element.closest("tr").dataset.queue;
    if (!cells.has(queue)) cells.set(queue, []);
    cells.get(queue).push(element);
  }
  const totals = document.querySelectorAll("[data-live^='total.']");
  document.addEventListener("lowq:figures", ({ detail: figures }) => {
    for (const element of totals) show(element, figures.total[element.dataset.live.slice(6)]);
    for (const [queue, elements] of cells) {
      const values = figures.queues[queue];
      if (values) for (const element of elements) show(element, values[element.dataset.field]);
    }
    if (live) live(figures);
  });
})();
