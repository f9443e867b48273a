"""Print the conda environment that holds exactly what lock.txt pins."""

from pathlib import Path


def conda_yaml() -> str:
    """The text of dflash.yaml, made from lock.txt."""
    lock = (Path(__file__).parent / "lock.txt").read_text().splitlines()
    pins = [f"      - {line}" for line in lock if line and not line.startswith("#")]
    head = """\
# Generated from lock.txt by envs/conda.py. The package itself is not in it: inside the environment,
# run `pip install --no-deps -e .` once (snakemake --sdm conda users: put that in your image).
channels:
  - conda-forge
dependencies:
  - python =3.11
  - pip
  - pip:
"""
    return head + "\n".join(pins) + "\n"


if __name__ == "__main__":
    print(conda_yaml(), end="")
