// Keeps a visible page up to date: numbers and charts by a stream, other pages (main[data-refresh]: the interval in
// seconds; 0: nothing changes any more) by fetching them again. Shows when it fails.
"use strict";

(() => {
  const root = document.body.dataset.root;
  const trouble = document.getElementById("trouble");
  const clock = new Intl.DateTimeFormat(undefined, { timeStyle: "medium" });
  // Seconds without a word, and to the next attempt when the browser makes none.
  const SILENCE = 5, AGAIN = 10;
  let heard = new Date();
  const main = document.querySelector("main[data-refresh]");
  // Seconds between two looks, as the viewer has chosen; 0: none. data-refreshes says that the page has a choice.
  let every = Math.max(5, main ? Number(main.dataset.refresh) : 0);
  if (["0", "2", "5", "30"].includes(choices.get("refresh"))) every = Number(choices.get("refresh"));

  const well = () => {
    heard = new Date();
    trouble.hidden = true;
  };
  const notLive = (why) => {
    const reload = document.createElement("a");
    reload.href = location.href;
    reload.textContent = "Load the page anew";
    trouble.replaceChildren(`Not live since ${clock.format(heard)}: ${why.replace(/\.?$/, ".")} `, reload);
    trouble.hidden = false;
  };

  // --- the stream ---

  let source = null;
  let shownAt = 0;
  // Only the queues that the page shows are asked for.
  const named = [...document.querySelectorAll("[data-queue]")].map((item) => item.dataset.queue).filter(Boolean);
  const names = new URLSearchParams([...new Set(named), ""].map((queue) => ["queue", queue]));
  let silence = 0;
  const open = () => {
    if (source || document.hidden || !every) return;
    source = new EventSource(`${root}/live?${names}`);
    source.addEventListener("figures", (event) => {
      clearTimeout(silence);
      silence = 0;
      well();
      // They come about every 2 s.
      if (every > 2 && Date.now() - shownAt < every * 1000 - 500) return;
      shownAt = Date.now();
      const figures = JSON.parse(event.data);
      document.dispatchEvent(new CustomEvent("lowq:figures", { detail: figures }));
      document.body.dataset.live = figures.at;
    });
    source.addEventListener("trouble", (event) => {
      clearTimeout(silence);
      silence = 0;
      notLive(JSON.parse(event.data).error);
    });
    source.addEventListener("error", () => {
      if (source && source.readyState === EventSource.CLOSED) {
        // Refused: too many streams, or the user may not look any more. The browser gives up then.
        close();
        notLive("the dashboard does not send the figures any more");
        silence = setTimeout(open, AGAIN * 1000);
      } else if (!silence) {
        // Streams end every few seconds, and the browser reconnects: that is no trouble.
        silence = setTimeout(() => notLive("the dashboard does not answer"), SILENCE * 1000);
      }
    });
  };
  const close = () => {
    clearTimeout(silence);
    silence = 0;
    if (source) source.close();
    source = null;
  };

  // --- pages that are fetched anew ---

  const keyOf = (node) => node.dataset && (node.dataset.key || (node.localName === "button" && node.value)) || "";
  // Notices, which are not part of the page.
  const isWord = (node) => node.id === "trouble" || (node.matches && node.matches("[role=status], [role=alert]"));

  // What the viewer, or app.js, has given them.
  const OURS = ["open", "tabindex", "role", "aria-label"];
  const alike = (node, fresh) => {
    if (node.nodeType === Node.TEXT_NODE) {
      if (node.data !== fresh.data) node.data = fresh.data;
      return;
    }
    if (node.nodeType !== Node.ELEMENT_NODE) return;
    for (const { name } of [...node.attributes]) {
      if (!fresh.hasAttribute(name) && !OURS.includes(name)) node.removeAttribute(name);
    }
    for (const { name, value } of fresh.attributes) {
      // The viewer opens and closes; of a time only the moment is new, the words are written by the clock here.
      if (name === "open" || (node.localName === "time" && name !== "datetime")) continue;
      if (node.getAttribute(name) !== value) node.setAttribute(name, value);
    }
    // Times, and marks of charts, are written by the clock here.
    if (node.localName !== "time" && node.dataset.local === undefined) children(node, fresh);
  };
  // The nodes that are there stay, so that focus, selection and scrolling do.
  const children = (old, fresh) => {
    const wanted = [...fresh.childNodes].filter((node) => !isWord(node));
    const keys = new Set(wanted.map(keyOf));
    const known = new Map();
    for (const node of [...old.childNodes]) {
      const key = keyOf(node);
      if (key && !keys.has(key)) node.remove();
      else if (key) known.set(key, node);
    }
    let at = old.firstChild;
    for (const node of wanted) {
      while (at && isWord(at)) at = at.nextSibling;
      const key = keyOf(node);
      const found = key ? known.get(key) : at && !keyOf(at) ? at : null;
      if (found && found.nodeName === node.nodeName) {
        if (found === at) at = at.nextSibling;
        else old.insertBefore(found, at);
        alike(found, node);
      } else {
        old.insertBefore(document.importNode(node, true), at);
      }
    }
    while (at) {
      const next = at.nextSibling;
      if (!isWord(at)) at.remove();
      at = next;
    }
  };

  let refreshing = false;
  let timer = 0;
  const refresh = async () => {
    if (refreshing || !timer || document.hidden) return;
    refreshing = true;
    try {
      const answer = await fetch(location.href, { signal: AbortSignal.timeout(SILENCE * 1000) });
      const fresh = new DOMParser().parseFromString(await answer.text(), "text/html").querySelector("main[data-refresh]");
      if (fresh) {
        children(main, fresh);
        well();
        document.body.dataset.live = heard.getTime() / 1000;
        if (fresh.dataset.refresh === "0") {
          clearInterval(timer);
          timer = 0;
        }
      } else {
        notLive(`the dashboard answers with ${answer.status}`);
      }
    } catch {
      if (!document.hidden) notLive("the dashboard does not answer");
    }
    refreshing = false;
  };

  // --- parts of a page with live numbers, which are fetched anew ---

  const parts = document.querySelectorAll("[data-part]");
  let fetching = false;
  const fetchParts = async () => {
    if (fetching || document.hidden || !every) return;
    fetching = true;
    try {
      const answer = await fetch(`${root}/parts`, { signal: AbortSignal.timeout(SILENCE * 1000) });
      if (answer.ok) {
        const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
        for (const part of parts) {
          const found = fresh.getElementById(part.id);
          if (found) children(part, found);
        }
        document.body.dataset.parts = Date.now();
      }
    } catch { /* the stream says when the dashboard does not answer */ }
    fetching = false;
  };

  // --- only visible pages are live: a browser opens six connections to a server, and hidden pages must not hold them ---

  const streams = document.querySelector("[data-live^='total.'], [data-charts]") && window.EventSource;
  const look = () => {
    if (document.hidden) {
      close();
    } else {
      if (streams) open();
      if (main) refresh();
      if (parts.length) fetchParts();
    }
  };
  let partsTimer = 0;
  const begin = () => {
    clearInterval(timer);
    clearInterval(partsTimer);
    timer = partsTimer = shownAt = 0;
    if (!every) {
      close();
      return;
    }
    if (streams) open();
    // The progress of a task comes each second, unless somebody wants less.
    const own = main ? Number(main.dataset.refresh) : 0;
    if (own) timer = setInterval(refresh, 1000 * (own < every && every <= 5 ? Math.min(own, every) : every));
    if (parts.length) partsTimer = setInterval(fetchParts, 1000 * every);
  };
  if (streams || (main && main.dataset.refresh !== "0")) document.body.dataset.refreshes = every;
  begin();
  document.addEventListener("lowq:refresh", () => {
    every = Number(document.body.dataset.refreshes);
    begin();
    if (every) look();
  });
  if (streams || main) {
    document.addEventListener("visibilitychange", look);
    addEventListener("pagehide", close);
    // A page that comes back as it was left.
    addEventListener("pageshow", (event) => {
      if (event.persisted) look();
    });
  }
})();
