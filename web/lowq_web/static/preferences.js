// What each viewer chooses for themselves, kept in their browser: the theme, how often pages are refreshed, and the keys.
"use strict";

(() => {
  const place = document.querySelector("[data-preferences]");
  const keep = (name, value) => {
    try {
      localStorage.setItem(name, value);
    } catch { /* it may be forbidden: then it is not remembered */ }
  };
  const kept = (name) => {
    try {
      return localStorage.getItem(name);
    } catch {
      return null;
    }
  };
  const choice = (label, name, options, chosen, changed) => {
    const [whole, select] = [document.createElement("label"), document.createElement("select")];
    for (const [value, text] of options) select.append(new Option(text, value, false, value === chosen));
    select.addEventListener("change", () => {
      keep(name, select.value);
      changed(select.value);
    });
    whole.append(`${label} `, select);
    place.append(whole, " ");
  };

  choice("Theme", "lowq-theme", [["", "system"], ["light", "light"], ["dark", "dark"]], document.documentElement.dataset.theme ?? "", (theme) => {
    if (theme) document.documentElement.dataset.theme = theme;
    else delete document.documentElement.dataset.theme;
  });
  if (document.body.dataset.refreshes) {
    choice("Refresh", "lowq-refresh", [["0", "off"], ["2", "every 2 s"], ["5", "every 5 s"], ["30", "every 30 s"]], document.body.dataset.refreshes, (seconds) => {
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
    ["Ctrl+K", "find an id"], ["?", "this help"], ["Esc", "close it"], ["\u2190 \u2192", "from moment to moment, in a chart that has the focus"],
    ["Tab", "to the next link or field; the first one skips to the content"], ["Space", "tick the job that has the focus"],
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
  // A single key can come from voice control by accident: it can be switched off.
  const box = document.createElement("input");
  box.type = "checkbox";
  box.checked = kept("lowq-keys") !== "off";
  box.addEventListener("change", () => keep("lowq-keys", box.checked ? "" : "off"));
  single.append(box, " ? opens this help");
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
  document.addEventListener("keydown", (event) => {
    const typing = event.target.closest && event.target.closest("input:not([type=checkbox]), select, textarea, [contenteditable]");
    if (event.key !== "?" || typing || event.ctrlKey || event.metaKey || event.altKey || !box.checked || help.open) return;
    event.preventDefault();
    help.showModal();
  });
})();
