// What each viewer has chosen is kept in their browser. The theme is set before anything is drawn: a page that is light
// first would flash.
"use strict";

// It may be forbidden: then nothing is remembered.
const choices = {
  get: (name) => {
    try {
      return localStorage.getItem(`lowq-${name}`) ?? "";
    } catch {
      return "";
    }
  },
  set: (name, value) => {
    try {
      localStorage.setItem(`lowq-${name}`, value);
    } catch { /* see above */ }
  },
};
if (["light", "dark"].includes(choices.get("theme"))) document.documentElement.dataset.theme = choices.get("theme");
