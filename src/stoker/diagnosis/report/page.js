const figures = JSON.parse(document.getElementById("figures").textContent);
const dark = window.matchMedia("(prefers-color-scheme: dark)");
function draw() {
  const ink = dark.matches ? "#e4e4e7" : "#18181b", line = dark.matches ? "#3f3f46" : "#e4e4e7";
  for (const [id, figure] of Object.entries(figures)) {
    const axis = { gridcolor: line, zerolinecolor: line, automargin: true };
    const layout = { ...figure.layout, font: { color: ink, family: "system-ui, sans-serif" },
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", autosize: true,
      margin: { l: 8, r: 8, t: 8, b: 8 },
      legend: { orientation: "h", yanchor: "top", y: -32 / (figure.layout.height - 80), traceorder: "normal" } };
    for (const name of ["xaxis", "yaxis", "yaxis2"]) if (layout[name]) layout[name] = { ...axis, ...layout[name] };
    Plotly.react(id, figure.data, layout, { responsive: true, displaylogo: false, displayModeBar: false });
  }
}
dark.addEventListener("change", draw);
draw();
