"use strict";
(() => {
  const root = document.documentElement;
  const said = document.getElementById("said");

  // Theme: the system's choice until the button is pressed.
  const theme = document.getElementById("theme");
  const system = matchMedia("(prefers-color-scheme: dark)");
  const kept = () => { try { return localStorage.getItem("hvdtrain-theme"); } catch { return null; } };
  const keep = (value) => { try { localStorage.setItem("hvdtrain-theme", value); } catch { /* not kept then */ } };
  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : system.matches);
  const show = () => theme.setAttribute("aria-pressed", String(isDark()));
  if (["light", "dark"].includes(kept())) root.dataset.theme = kept();
  theme.hidden = false;
  theme.addEventListener("click", () => { root.dataset.theme = isDark() ? "light" : "dark"; keep(root.dataset.theme); show(); });
  system.addEventListener("change", show);
  show();

  // Copy buttons of options and commands.
  const copied = (button) => {
    said.textContent = `copied ${button.dataset.copy}`;
    button.textContent = "copied";
    setTimeout(() => { button.textContent = "copy"; }, 1500);
  };
  const byHand = (button) => {  // without clipboard access: pages from files or over plain HTTP
    const code = button.previousElementSibling;
    getSelection().selectAllChildren(code);
    if (document.execCommand("copy")) { getSelection().removeAllRanges(); copied(button); }
  };
  for (const button of document.querySelectorAll(".copy")) {
    button.hidden = false;
    button.addEventListener("click", () => {
      if (!navigator.clipboard) { byHand(button); return; }
      navigator.clipboard.writeText(button.dataset.copy).then(() => copied(button), () => byHand(button));
    });
  }

  // Make wide content scrollable by keyboard.
  const wide = new ResizeObserver((entries) => {
    for (const { target } of entries) {
      if (target.scrollWidth > target.clientWidth) target.tabIndex = 0; else target.removeAttribute("tabindex");
    }
  });
  for (const box of document.querySelectorAll(".scroll")) wide.observe(box);

  // Each rank is a table body of two rows; the second shows the causes.
  for (const button of document.querySelectorAll(".why")) {
    button.addEventListener("click", () => {
      const open = button.getAttribute("aria-expanded") !== "true";
      button.setAttribute("aria-expanded", String(open));
      document.getElementById(button.getAttribute("aria-controls")).hidden = !open;
    });
  }
  const table = document.getElementById("rank-table");
  const value = (body, column) => body.rows[0].cells[column].dataset.v ?? "";
  const compare = (one, other) => {
    const numbers = one !== "" && other !== "" && !isNaN(one) && !isNaN(other);
    return numbers ? one - other : one.localeCompare(other);
  };
  const sortBy = (heading) => {
    const first = heading.querySelector("button").dataset.first || "descending";
    const now = heading.getAttribute("aria-sort");
    const next = now === "none" ? first : now === "ascending" ? "descending" : "ascending";
    for (const other of table.tHead.rows[0].cells) if (other.hasAttribute("aria-sort")) other.setAttribute("aria-sort", "none");
    heading.setAttribute("aria-sort", next);
    const sign = next === "ascending" ? 1 : -1;
    const column = heading.cellIndex;
    const bodies = [...table.tBodies].sort((a, b) => sign * compare(value(a, column), value(b, column)));
    table.append(...bodies);
  };
  for (const button of document.querySelectorAll(".sort")) button.addEventListener("click", () => sortBy(button.closest("th")));
})();
