// Niceties only: the page is complete without them. Sorting by a column, and a filter for the long table.
const value = (cell) => {
  const found = parseFloat((cell?.textContent ?? "").replaceAll(",", ""));
  return isNaN(found) ? null : found;
};
for (const table of document.querySelectorAll("table")) {
  const body = table.tBodies[0];
  if (!body) continue;
  [...table.tHead.rows[0].cells].forEach((head, column) => {
    const button = document.createElement("button");
    button.textContent = head.textContent;
    head.replaceChildren(button);
    button.addEventListener("click", () => {
      const up = head.getAttribute("aria-sort") === "descending";
      for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", up ? "ascending" : "descending");
      const words = [...body.rows].every((row) => value(row.cells[column]) === null);
      const compare = (a, b) => {
        const [x, y] = [a.cells[column], b.cells[column]];
        if (words) return x.textContent.localeCompare(y.textContent) * (up ? 1 : -1);
        const [p, q] = [value(x), value(y)];
        if (p === null || q === null) return (p === null) - (q === null);
        return up ? p - q : q - p;
      };
      body.append(...[...body.rows].sort(compare));
    });
  });
}
