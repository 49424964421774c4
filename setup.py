"""The folders search/, modeling/ and templates/ stand at the top level and are mapped below lpes_bake."""

from setuptools import find_packages, setup

TOPS = ("search", "modeling", "templates")
inside = find_packages(include=["lpes_bake", "lpes_bake.*"], exclude=[f"lpes_bake.{top}*" for top in TOPS])
mapped = [f"lpes_bake.{name}" for name in find_packages(include=[p for top in TOPS for p in (top, f"{top}.*")])]
setup(
    packages=sorted({*inside, *mapped}),
    package_dir={f"lpes_bake.{top}": top for top in TOPS},
)
