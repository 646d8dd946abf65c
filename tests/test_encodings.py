"""Files are read and written as UTF-8 in every locale.

Under Latin-1, an umlaut in the path of the state folder failed a training.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PRODUCT = ("api", "hanzo_ml", "hanzo_ml_assets", "recipes", "resources", "sensors")


def list_unencoded(file: Path) -> Iterator[str]:
    """List calls that read or write text in the encoding of the locale."""
    for call in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if not isinstance(call, ast.Call) or any(keyword.arg == "encoding" for keyword in call.keywords):
            continue
        name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
        texts = [each.value for each in call.args if isinstance(each, ast.Constant) and isinstance(each.value, str)]
        mode = next((text for text in texts if set(text) <= set("rwaxbt+")), "b")
        is_method = isinstance(call.func, ast.Attribute) and name in ("read_text", "write_text")
        if is_method or (name in ("open", "fdopen") and "b" not in mode):
            yield f"{file.relative_to(ROOT)}:{call.lineno}"


def test_every_text_file_names_its_encoding() -> None:
    files = (file for folder in PRODUCT for file in sorted((ROOT / folder).rglob("*.py")))
    assert [place for file in files for place in list_unencoded(file)] == []
