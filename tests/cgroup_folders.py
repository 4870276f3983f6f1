"""A folder in place of the machine's cgroups."""

from pathlib import Path

from sfactory.config import cgroups


def use_cgroups(monkeypatch, folder: Path, own: str, files: dict[str, object]) -> None:
    """Let a folder stand for the machine's cgroups."""
    for name, content in files.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{content}\n")
    folder.mkdir(exist_ok=True)
    (folder / "own").write_text(f"{own}\n")
    monkeypatch.setattr(cgroups, "CGROUPS", folder)
    monkeypatch.setattr(cgroups, "OWN_CGROUPS", folder / "own")
