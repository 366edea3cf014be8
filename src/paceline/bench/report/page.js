// Niceties only: the page is complete without them. Sorting by a column, and a filter for long tables.
for (const table of document.querySelectorAll("table[data-sort]")) {
  const body = table.tBodies[0];
  [...table.tHead.rows[0].cells].forEach((head, column) => {
    const button = document.createElement("button");
    button.textContent = head.textContent;
    head.replaceChildren(button);
    button.addEventListener("click", () => {
      const up = head.getAttribute("aria-sort") === "descending";
      for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", up ? "ascending" : "descending");
      const key = (row) => row.cells[column].dataset.v ?? "";
      const compare = (a, b) => {
        const [x, y] = [key(a), key(b)];
        if (x === "" || y === "") return (x === "") - (y === "");
        const order = isNaN(x) || isNaN(y) ? x.localeCompare(y) : x - y;
        return up ? order : -order;
      };
      body.append(...[...body.rows].sort(compare));
    });
  });
}
for (const table of document.querySelectorAll("table[data-filter]")) {
  const label = document.createElement("label");
  label.className = "filter";
  const input = document.createElement("input");
  input.type = "search";
  input.placeholder = "Filter by workload or method";
  input.setAttribute("aria-label", input.placeholder);
  label.append(input);
  table.parentElement.before(label);
  input.addEventListener("input", () => {
    const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
    for (const row of table.tBodies[0].rows) {
      const text = (row.cells[0].textContent + " " + row.cells[1].textContent).toLowerCase();
      row.hidden = !words.every((word) => text.includes(word));
    }
  });
}
