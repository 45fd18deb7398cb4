"use strict";
// One plot for each element with curves: drag to zoom, double-click to go back, click a name to hide its curve.
const COLOURS = ["--blue", "--orange", "--green", "--purple", "--teal", "--pink", "--red", "--sky", "--grey"];
const shade = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const plots = [];
for (const place of document.querySelectorAll(".curves")) {
  const { names, data } = JSON.parse(place.querySelector("script").textContent);
  const axis = { stroke: () => shade("--soft"), grid: { stroke: () => shade("--line"), width: 1 }, ticks: { show: false } };
  const size = () => ({ width: place.clientWidth, height: place.clientWidth < 560 ? 260 : 340 });
  const plot = new uPlot({
    ...size(),
    scales: { x: { time: false } },
    axes: [{ ...axis, label: "optimizer step", labelSize: 22, size: 34 }, { ...axis, size: 52 }],
    cursor: { focus: { prox: 24 } },
    focus: { alpha: 0.3 },
    series: [
      { label: "step" },
      ...names.map((label, index) => ({
        label,
        stroke: () => shade(COLOURS[index % COLOURS.length]),
        dash: index < COLOURS.length ? undefined : [6, 4],
        width: 2,
        spanGaps: true,
        points: { show: data[index + 1].filter((value) => value !== null).length < 12 },
        value: (_, value) => (value == null ? "" : value.toFixed(4)),
      })),
    ],
  }, data, place);
  plots.push([plot, size]);
}
addEventListener("resize", () => plots.forEach(([plot, size]) => plot.setSize(size())));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => plots.forEach(([plot]) => plot.redraw()));
