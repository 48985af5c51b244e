"""Draws rows.svg from the row plan itself: which token each row reads and predicts at each step."""

from pathlib import Path

import torch

from eyas.drafters.eagle3.ttt_rows import plan_rows
from eyas.types import supervised_positions

TOKENS = ["What", "is", "rain", "?", "Water", "falls", "from", "clouds", "⟨end⟩"]
ANSWER = 4  # index of the assistant's first token
STEPS = 3
CELL, LEFT, TOP, LINE = 78, 118, 70, 34


def draw() -> str:
    mask = torch.tensor([i >= ANSWER for i in range(len(TOKENS))])
    supervised = torch.from_numpy(supervised_positions(mask.numpy(), cut=False))
    plan = plan_rows(supervised, torch.zeros(len(TOKENS), dtype=torch.long), STEPS)
    width = LEFT + CELL * len(TOKENS) + 10
    out = []

    def text(x: float, y: float, words: str, kind: str = "", anchor: str = "middle") -> None:
        out.append(f'<text x="{x}" y="{y}" text-anchor="{anchor}" class="{kind}">{words}</text>')

    text(LEFT - 10, 26, "token", "soft", "end")
    text(LEFT - 10, 52, "loss mask", "soft", "end")
    for i, token in enumerate(TOKENS):
        kind = "answer" if mask[i] else "prompt"
        x = LEFT + CELL * i
        out.append(f'<rect x="{x + 2}" y="8" width="{CELL - 4}" height="26" rx="4" class="{kind}"/>')
        text(x + CELL / 2, 26, token)
        text(x + CELL / 2, 52, f"{i}: {int(mask[i])}", "soft")
    y = TOP
    for k in range(STEPS):
        y += 16
        text(10, y + 12, f"step {k}", "head", "start")
        for row in plan.rows[k].tolist():
            y += LINE
            read, predicted = row + 1 + k, row + 2 + k
            text(LEFT - 10, y + 4, f"row {row}", "", "end")
            if k == 0:
                out.append(f'<circle cx="{LEFT + CELL * (row + 0.5)}" cy="{y}" r="7" class="state"/>')
            start, end = LEFT + CELL * (read + 0.5), LEFT + CELL * (predicted + 0.5)
            out.append(f'<rect x="{start - 28}" y="{y - 11}" width="56" height="22" rx="4" class="read"/>')
            text(start, y + 4, "reads")
            out.append(f'<line x1="{start + 30}" y1="{y}" x2="{end - 36}" y2="{y}" class="arrow"/>')
            out.append(f'<rect x="{end - 34}" y="{y - 11}" width="68" height="22" rx="4" class="predicts"/>')
            text(end, y + 4, "predicts")
        y += 14
    y += 34
    out.append(f'<circle cx="{LEFT + 8}" cy="{y - 4}" r="7" class="state"/>')
    text(
        LEFT + 24,
        y,
        "the target's hidden states that a row starts from; at later steps it goes on from its own",
        "soft",
        "start",
    )
    height = y + 16
    style = (
        "text{font:13px system-ui,sans-serif;fill:#1a1a1a}.soft{fill:#5c5c5c}.head{font-weight:600}"
        ".prompt{fill:#e4e4e4}.answer{fill:#bfe8cb}.read{fill:#cfe0fb}.predicts{fill:#fbdcc4}.state{fill:#8a3ea8}"
        ".arrow{stroke:#1a1a1a;stroke-width:1.5}"
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="rows and steps"><style>{style}</style><rect width="{width}" height="{height}" '
        f'fill="#ffffff" rx="8"/>{"".join(out)}</svg>\n'
    )


if __name__ == "__main__":
    (Path(__file__).parent / "rows.svg").write_text(draw(), encoding="utf-8")
