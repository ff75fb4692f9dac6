"""The charsets that can be searched for secrets: ASCII characters keep their bytes, apart from added NULs."""

import re
from collections.abc import Iterable

_DECLARED = re.compile(r"charset\s*=\s*[\"']?([^\s\"';,]*)", re.IGNORECASE)
_KNOWN = re.compile(
    r"(?:utf-?(?:8|16|32)(?:le|be)?|utf8mb[34]|unicode-1-1-utf-8|ucs-2|iso-10646-ucs-[24]|us-ascii|ascii|binary"
    r"|iso[-_]?8859[-_]?[0-9]{1,2}(?:-[ei]|:[0-9]{4})?|latin-?[0-9]{1,2}|windows-(?:125[0-8]|874|31j|949|936)"
    r"|cp(?:125[0-8]|437|85[0-9]|86[0-9]|874|932|936|949|950)|koi8-(?:r|u|t|ru)|macintosh|x-mac-[a-z]+|tis-620"
    r"|gbk|x-gbk|gb2312|gb18030|big5(?:-hkscs)?|euc-(?:jp|kr|tw|cn)|shift[-_]jis|x-sjis|sjis|ms_kanji|ks_c_5601-1987)?",
    re.IGNORECASE,
)


def searchable(content_types: Iterable[str]) -> bool:
    """Whether every charset in these Content-Type values can be searched."""
    for value in content_types:
        if "charset*" in value.lower() or not all(map(_KNOWN.fullmatch, _DECLARED.findall(value))):
            return False
    return True
