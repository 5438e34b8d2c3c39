"use strict";
// Optional: adds zoom to the drawings and a search for nodes, and opens all sections for printing.
(() => {
  for (const pair of document.querySelectorAll(".pair")) {  // before and after have one scale
    const drawings = [...pair.querySelectorAll(".graph")].map((drawing) => (
      { drawing, pane: drawing.parentElement, width: Number(drawing.getAttribute("width")), height: Number(drawing.getAttribute("height")) }
    ));
    let scale = 1;
    const zoom = (requested) => {
      scale = Math.min(4, Math.max(0.25, requested));
      for (const { drawing, width, height } of drawings) {
        drawing.setAttribute("width", width * scale);
        drawing.setAttribute("height", height * scale);
      }
    };
    const fitting = () => Math.min(...drawings.map(({ pane, width }) => (pane.clientWidth - 24) / width));
    const steps = { in: () => zoom(scale * 1.25), out: () => zoom(scale / 1.25), fit: () => zoom(fitting()), whole: () => zoom(1) };
    for (const button of pair.querySelectorAll("button")) button.addEventListener("click", steps[button.dataset.zoom]);
    for (const { pane } of drawings) {
      pane.addEventListener("keydown", (event) => {
        const step = { "+": "in", "=": "in", "-": "out", "0": "whole", "f": "fit" }[event.key];
        if (step && !event.ctrlKey && !event.metaKey && !event.altKey) { steps[step](); event.preventDefault(); }
      });
    }
    for (const bar of pair.querySelectorAll(".zoom")) bar.hidden = false;
    if (drawings.length > 0 && drawings[0].pane.clientWidth > 0) zoom(Math.min(1, Math.max(0.7, fitting())));
  }

  const field = document.querySelector("#find");
  if (field) {
    const status = document.querySelector("#found");
    const groups = [...document.querySelectorAll("details.change")];
    const opened = new Map(groups.map((group) => [group, group.open]));
    const find = () => {
      const text = field.value.trim().toLowerCase();
      let changes = 0;
      for (const group of groups) {
        const rows = [...group.querySelectorAll("tr[data-find]")];
        const matches = rows.filter((row) => row.textContent.toLowerCase().includes(text));
        for (const row of rows) row.hidden = !matches.includes(row);
        let hits = 0;
        for (const node of group.querySelectorAll(".node")) {
          const hit = text !== "" && node.textContent.toLowerCase().includes(text);
          node.classList.toggle("hit", hit);
          hits += hit;
        }
        changes += matches.length;
        if (matches.length === 0 && hits > 0) for (const row of rows) row.hidden = false;
        group.hidden = text !== "" && matches.length + hits === 0;
        group.open = text === "" ? opened.get(group) : !group.hidden;
      }
      status.textContent = text === "" ? "" : changes === 1 ? "1 change" : `${changes} changes`;
    };
    field.addEventListener("input", find);
    field.closest(".tools").hidden = false;
  }

  // Older browsers do not print the contents of closed <details>.
  const closed = [];
  addEventListener("beforeprint", () => {
    for (const part of document.querySelectorAll("details:not([open])")) { closed.push(part); part.open = true; }
  });
  addEventListener("afterprint", () => { for (const part of closed.splice(0)) part.open = false; });
})();
