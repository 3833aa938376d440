"""Just enough of C++ for tidy rules: comments and strings away, functions found.

No parser: it knows braces and what stands before them. What it can't tell it leaves alone.
"""

import re

_TOKEN = re.compile(
    r'R"(?P<delimiter>[^()\s\\]{0,16})\(.*?\)(?P=delimiter)"'
    r'|"(?:\\.|[^"\\\n])*"'
    r"|(?<![0-9A-Fa-f])'(?:\\.|[^'\\\n])+'"
    r"|//[^\n]*"
    r"|/\*.*?\*/",
    re.DOTALL,
)
_DIRECTIVE = re.compile(r"^[ \t]*#(?:[^\n]*\\\n)*[^\n]*", re.MULTILINE)
_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*([<"])([^>"]+)[>"]')


def includes(text):
    """(line number, path, quoted) of each #include."""
    for number, line in enumerate(text.splitlines(), 1):
        match = _INCLUDE.match(line)
        if match:
            yield number, match[2], match[1] == '"'


def blank(text):
    """The text with comments, literals and directives blanked; line numbers stay."""

    def spaces(match):
        return re.sub(r"[^\n]", " ", match[0])

    return _DIRECTIVE.sub(spaces, _TOKEN.sub(spaces, text))


def _without_parentheses(text):
    while True:
        shorter = re.sub(r"\([^()]*\)", "@", text)
        if shorter == text:
            return text
        text = shorter


def _opens(statement):
    """What the brace after `statement` opens: 'scope', 'function' or 'other'."""
    text = re.sub(r"\boperator\s*(?:\(\s*\)|[^\s\w(]+)", "operator_", statement)
    flat = _without_parentheses(re.sub(r"\btemplate\s*<[^{}]*?>\s*(?=\w|\[)", " ", text)).strip()
    flat = re.sub(r"^(?:public|private|protected)\s*:", "", flat).strip()
    if re.match(r"(?:inline\s+)?namespace\b|extern\s*$", flat):
        return "scope"
    if re.match(r"(?:typedef\s+)?(?:class|struct|union|enum)\b", flat) and "@" not in re.sub(
            r"\b(?:alignas|__attribute__)\s*@", "", flat):
        return "scope"
    if "=" in flat:
        return "function" if re.search(r"=\s*\[", flat) else "other"
    return "function" if "@" in flat else "other"


def functions(text):
    """(first line, last line, name) of each function with a body, lambdas and bodies inside a
    function counted as part of it."""
    code = blank(text)
    found = []
    stack = []  # (kind, offset of the first character of the statement)
    start = 0  # of the statement now read
    inside = 0  # depth within a function or initializer
    for match in re.finditer(r"[{};]", code):
        at, char = match.start(), match[0]
        if char == "{":
            if inside:
                inside += 1
                continue
            kind = _opens(code[start:at])
            stack.append((kind, start))
            if kind == "scope":
                start = at + 1
            else:
                inside = 1
        elif char == "}":
            if inside:
                inside -= 1
                if inside:
                    continue
                kind, begin = stack.pop()
                if re.match(r"\s*[,{]", code[at + 1:]) and kind == "function":
                    # A member initialized with braces: the body is yet to come.
                    start = begin
                    continue
                if kind == "function":
                    found.append(_describe(code, begin, at))
            elif stack:
                stack.pop()
            start = at + 1
        elif not inside:
            start = at + 1
    return found


def _describe(code, begin, end):
    begin += re.match(r"(?:\s+|(?:public|private|protected)\s*:)*", code[begin:]).end()
    head = code[begin:end].split("{")[0]
    name = re.search(r"([~\w:]+)\s*\(", head)
    return (code.count("\n", 0, begin) + 1, code.count("\n", 0, end) + 1,
            name[1] if name else "function")
