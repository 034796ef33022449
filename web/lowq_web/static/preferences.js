// What each viewer chooses for themselves: the theme, how times are written, how often pages are refreshed, and the keys.
"use strict";

(() => {
  const place = document.querySelector("[data-preferences]");
  const choice = (label, name, options, chosen, changed) => {
    const [whole, select] = [document.createElement("label"), document.createElement("select")];
    for (const [value, text] of options) select.append(new Option(text, value, false, value === chosen));
    select.addEventListener("change", () => {
      choices.set(name, select.value);
      changed(select.value);
    });
    whole.append(`${label} `, select);
    place.append(whole, " ");
  };

  choice("Theme", "theme", [["", "system"], ["light", "light"], ["dark", "dark"]], document.documentElement.dataset.theme ?? "", (theme) => {
    if (theme) document.documentElement.dataset.theme = theme;
    else delete document.documentElement.dataset.theme;
  });
  choice("Times", "times", [["", "how long ago"], ["exact", "exact"]], choices.get("times"), () => document.dispatchEvent(new Event("lowq:times")));
  if (document.body.dataset.refreshes) {
    choice("Refresh", "refresh", [["0", "off"], ["2", "every 2 s"], ["5", "every 5 s"], ["30", "every 30 s"]], document.body.dataset.refreshes, (seconds) => {
      document.body.dataset.refreshes = seconds;
      document.dispatchEvent(new Event("lowq:refresh"));
    });
  } else if (!("posted" in document.body.dataset)) {  // what a form has brought has no address of its own
    const loaded = new Intl.DateTimeFormat(undefined, { timeStyle: "medium" }).format(new Date());
    const reload = document.createElement("a");
    reload.href = location.href;
    reload.textContent = "reload";
    const note = document.createElement("span");
    note.append(`As of ${loaded}: `, reload);
    place.append(note, " ");
  }

  // --- keys ---

  const help = document.createElement("dialog");
  help.setAttribute("aria-labelledby", "keys");
  const rows = [
    ["/", "find an id; Ctrl+K, too"], ["j k", "to the next row, to the one before; Enter opens it"], ["x", "tick the job of the row"],
    ["\u2190 \u2192", "from moment to moment or shard to shard, in a picture that has the focus"],
    ["Tab", "to the next link or field; the first ones skip to the content"], ["?", "this help"], ["Esc", "close it"],
  ];
  const [title, list, single, ok] = ["h2", "dl", "label", "button"].map((name) => document.createElement(name));
  title.id = "keys";
  title.textContent = "Keys";
  for (const [key, does] of rows) {
    const [row, term, what, kbd] = ["div", "dt", "dd", "kbd"].map((name) => document.createElement(name));
    kbd.textContent = key;
    what.textContent = does;
    term.append(kbd);
    row.append(term, what);
    list.append(row);
  }
  // A single key can come from voice control by accident: they can be switched off.
  const box = document.createElement("input");
  box.type = "checkbox";
  box.checked = choices.get("keys") !== "off";
  box.addEventListener("change", () => choices.set("keys", box.checked ? "" : "off"));
  single.append(box, " Keys without Ctrl: / j k x ?");
  ok.type = "button";
  ok.textContent = "Close";
  ok.addEventListener("click", () => help.close());
  help.append(title, list, single, ok);
  document.body.append(help);

  const opener = document.createElement("button");
  opener.type = "button";
  opener.textContent = "Keys";
  opener.addEventListener("click", () => help.showModal());
  place.append(opener);
  const row = () => document.activeElement.closest("tr");
  const step = (way) => {
    const rows = [...document.querySelectorAll("main tbody:last-of-type > tr")].filter((each) => each.querySelector("a"));
    rows[Math.min(Math.max(rows.indexOf(row()) + way, 0), rows.length - 1)]?.querySelector("th a, a").focus();
  };
  const keys = {
    "?": () => help.showModal(),
    "/": () => document.querySelector(".search input").select(),
    j: () => step(1),
    k: () => step(-1),
    x: () => row()?.querySelector("input[type=checkbox]")?.click(),
  };
  document.addEventListener("keydown", (event) => {
    const typing = event.target.closest && event.target.closest("input:not([type=checkbox]), select, textarea, [contenteditable]");
    if (!Object.hasOwn(keys, event.key) || typing || event.ctrlKey || event.metaKey || event.altKey || !box.checked || help.open) return;
    event.preventDefault();
    keys[event.key]();
  });
})();
