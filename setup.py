"""What pyproject.toml cannot say: a wheel without the C extension, and the README as the page of a package index."""

import os
import re
from pathlib import Path

import setuptools

README = (Path(__file__).parent / "README.md").read_text(encoding="utf-8")
# on an index, links between files lead nowhere
BETWEEN_FILES = re.compile(r"\[((?:[^\[\]]|\[[^\]]*\])*)\]\((?!https?://|#)[^)\s]+\)")


class Distribution(setuptools.Distribution):
    """With `UCFORMAT_EXTENSION=0` the wheel is one for every platform."""

    def has_ext_modules(self) -> bool:
        """Whether there is anything to compile."""
        return os.environ.get("UCFORMAT_EXTENSION") != "0" and bool(super().has_ext_modules())


setuptools.setup(
    distclass=Distribution,
    long_description=BETWEEN_FILES.sub(r"\1", README),
    long_description_content_type="text/markdown",
)
