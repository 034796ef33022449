// The theme that was chosen, before anything is drawn: a page that is light first would flash.
"use strict";

try {
  const theme = localStorage.getItem("lowq-theme");
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
} catch { /* it may be forbidden: then the system's */ }
