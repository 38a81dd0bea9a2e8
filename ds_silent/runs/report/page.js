"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const tip = document.getElementById("tip");
  const slider = document.getElementById("step");
  const marked = document.getElementById("marked");
  const drawings = [...document.querySelectorAll(".drawing")].map((place) => {
    const figure = data.figures[Number(place.dataset.figure)];
    const svg = place.querySelector("svg.chart");
    return { place, svg, figure, axis: data.axes[figure.run], at: svg.querySelector(".at"), pin: svg.querySelector(".pin") };
  });
  let pinned = null;

  const number = (value) => value === null ? "–" : (typeof value === "string" ? value : String(Number(value.toPrecision(4))));
  const shareOf = (axis, step) => (step - axis.low) / (axis.high - axis.low);
  const binOf = (axis, share) => Math.min(Math.max(Math.floor(share * axis.steps.length), 0), axis.steps.length - 1);
  const spoken = (axis, bin) => {
    const [first, last] = axis.steps[bin];
    return first === last ? `step ${first}` : `steps ${first} to ${last}`;
  };
  const moved = (line, share) => {
    const x = share === null || share < 0 || share > 1 ? "-9999" : `${100 * share}%`;
    line.setAttribute("x1", x);
    line.setAttribute("x2", x);
  };

  const lines = (drawing, bin, y) => {
    const { figure, svg } = drawing;
    if (figure.rows) {
      const row = Math.min(Math.max(Math.floor(y / Number(svg.dataset.row)), 0), figure.rows.length - 1);
      return [figure.rows[row], `${figure.unit}: ${number(figure.values[row][bin])}`];
    }
    return (figure.series || []).flatMap((one) => {
      if (one.mean && one.mean[bin] !== null) {
        const range = one.low && one.low[bin] !== one.high[bin] ? ` (${number(one.low[bin])} … ${number(one.high[bin])})` : "";
        return [`${one.name}: ${number(one.mean[bin])}${range}`];
      }
      if (!one.mean && one.low && one.low[bin] !== null) return [`${one.name}: ${number(one.low[bin])} … ${number(one.high[bin])}`];
      return one.broken && one.broken.includes(bin) ? [`${one.name}: not a finite number`] : [];
    });
  };
  const tell = (title, rest, event) => {
    tip.replaceChildren();
    const head = document.createElement("b");
    head.textContent = title;
    tip.append(head, ...rest.map((text) => Object.assign(document.createElement("div"), { textContent: text })));
    tip.hidden = false;
    const { width, height } = tip.getBoundingClientRect();
    const x = event.clientX + 16 + width > innerWidth ? event.clientX - width - 16 : event.clientX + 16;
    tip.style.transform = `translate(${Math.max(4, x)}px, ${Math.min(event.clientY + 14, innerHeight - height - 6)}px)`;
  };
  const away = () => {
    tip.hidden = true;
    drawings.forEach((one) => moved(one.at, null));
  };

  const mark = (step) => {
    pinned = step;
    marked.textContent = step === null ? "none" : step.toLocaleString("en");
    drawings.forEach((one) => moved(one.pin, step === null ? null : shareOf(one.axis, step)));
    document.querySelectorAll(".matrices").forEach((held) => {
      const each = data.matrices[Number(held.dataset.run)].map((one, n) => [Math.abs((one.step ?? Infinity) - step), n]);
      const nearest = step === null || !each.length ? -1 : each.reduce((a, b) => b[0] < a[0] ? b : a)[1];
      held.querySelectorAll(".tile").forEach((tile, n) => tile.classList.toggle("marked", n === nearest));
    });
    if (step !== null) slider.value = step;
    try { history.replaceState(null, "", step === null ? "#" : `#step=${step}`); } catch { /* a page from a file in a strict browser */ }
  };
  const middle = (axis, bin) => Math.round((axis.steps[bin][0] + axis.steps[bin][1]) / 2);

  for (const drawing of drawings) {
    const found = (event) => {
      const box = drawing.svg.getBoundingClientRect();
      const share = (event.clientX - box.left) / box.width;
      return { share, bin: binOf(drawing.axis, share), y: event.clientY - box.top, inside: share >= 0 && share <= 1 };
    };
    drawing.svg.addEventListener("pointermove", (event) => {
      const { bin, y, inside } = found(event);
      if (!inside) return away();
      const step = middle(drawing.axis, bin);
      drawings.forEach((one) => moved(one.at, shareOf(one.axis, step)));
      tell(spoken(drawing.axis, bin), lines(drawing, bin, y), event);
    });
    drawing.svg.addEventListener("pointerleave", away);
    drawing.svg.addEventListener("click", (event) => {
      const { bin, inside } = found(event);
      if (inside) mark(middle(drawing.axis, bin));
    });
  }
  document.querySelectorAll(".matrices").forEach((held) => held.querySelectorAll(".tile").forEach((tile, n) => {
    const one = data.matrices[Number(held.dataset.run)][n], svg = tile.querySelector("svg");
    if (!one.values) return;
    svg.addEventListener("pointermove", (event) => {
      const box = svg.getBoundingClientRect(), count = one.values.length;
      const at = (place, from, size) => Math.min(Math.max(Math.floor(count * (place - from) / size), 0), count - 1);
      const row = at(event.clientY, box.top, box.height), column = at(event.clientX, box.left, box.width);
      tell(`step ${one.step}`, [row === column ? `rank ${row}` : `ranks ${row} and ${column}: ${number(one.values[row][column])}`], event);
    });
    svg.addEventListener("pointerleave", away);
    svg.addEventListener("click", () => mark(one.step));
  }));

  const every = data.axes.flatMap((axis) => [axis.steps[0][0], axis.steps[axis.steps.length - 1][1]]);
  slider.min = Math.min(...every);
  slider.max = Math.max(...every);
  slider.addEventListener("input", () => mark(Number(slider.value)));
  document.getElementById("clear").addEventListener("click", () => mark(null));
  document.querySelectorAll("[data-run-step]").forEach((one) => one.addEventListener("click", () => mark(Number(one.dataset.runStep))));

  const save = (name, type, text) => {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([text], { type }));
    link.download = name;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  };
  const quoted = (value) => {
    const text = value === null || value === undefined ? "" : String(value);
    return /[",\n]/.test(text) || /^[=+@\t\r]/.test(text) ? `"${text.replace(/^([=+@\t\r])/, "'$1").replace(/"/g, '""')}"` : text;
  };
  document.getElementById("csv").addEventListener("click", () => {
    const rows = [["run", "figure", "curve", "first step", "last step", "lowest", "mean", "highest"]];
    for (const figure of data.figures) {
      const axis = data.axes[figure.run];
      const curves = figure.rows ? figure.rows.map((name, n) => ({ name, mean: figure.values[n] })) : (figure.series || []);
      for (const one of curves) axis.steps.forEach(([first, last], bin) => {
        const [low, mean, high] = ["low", "mean", "high"].map((key) => one[key] ? one[key][bin] : null);
        if (low !== null || mean !== null || high !== null) rows.push([axis.name, figure.title, one.name, first, last, low ?? mean, mean, high ?? mean]);
      });
    }
    save("ds_silent.csv", "text/csv", rows.map((row) => row.map(quoted).join(",")).join("\n"));
  });
  document.getElementById("json").addEventListener("click", () => save("ds_silent.json", "application/json", JSON.stringify(data)));

  const asked = /^#step=(\d+)$/.exec(location.hash);
  if (asked) mark(Number(asked[1]));
  else if (data.since) mark(data.since);
})();
