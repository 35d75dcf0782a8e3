"""The look of all figures: one column of a paper, colours that colour-blind readers tell apart."""

import re
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

COLUMN = 3.4  # inches
# Okabe and Ito (2008).
BLACK, ORANGE, SKY, GREEN = "#000000", "#E69F00", "#56B4E9", "#009E73"
BLUE, VERMILLION, PURPLE, GREY = "#0072B2", "#D55E00", "#CC79A7", "#999999"
CYCLE = (BLUE, VERMILLION, GREEN, ORANGE, PURPLE, SKY, BLACK)
STYLE = {
    "font.size": 8,
    "axes.labelsize": 8,
    "axes.titlesize": 8,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "legend.fontsize": 7,
    "legend.frameon": False,
    "legend.handlelength": 1.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.6,
    "lines.linewidth": 1.2,
    "lines.markersize": 3.5,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e6e6e6",
    "grid.linewidth": 0.5,
    "svg.hashsalt": "ddtree",  # the same data gives the same file
}


def panels(count: int, height: float) -> tuple[Figure, list]:
    """A figure of one column with `count` panels below each other, sharing x."""
    figure = Figure(figsize=(COLUMN, height * count + 0.35), layout="constrained")
    return figure, list(figure.subplots(count, 1, sharex=True, squeeze=False)[:, 0])


def legend(figure: Figure, axes, columns: int) -> None:
    """One legend above all panels, where it hides no data."""
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=min(columns, len(labels)))


def save(figure: Figure, folder: Path, name: str) -> list[Path]:
    """Writes PNG and SVG."""
    folder.mkdir(parents=True, exist_ok=True)
    stem = re.sub(r"[^A-Za-z0-9.-]+", "_", name).strip("_")
    paths = [folder / f"{stem}.png", folder / f"{stem}.svg"]
    with matplotlib.rc_context(STYLE):
        figure.savefig(paths[0], dpi=200)
        figure.savefig(paths[1], metadata={"Date": None})
    return paths
