"""Counts the product: lines by room, what a request passes, the fields of a request's forms.

Read from the syntax trees, so the counts do not depend on what runs. The path of a request follows
names: a function leads to the functions and classes that it names, a class to its constructor and,
of its methods, to those that occur as attributes in reached code of modules that import the class.
A protocol leads to all classes that have its methods. That is more than runs for one request, and
the same more in each count.
"""

import ast
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path

ROOT = Path(__file__).parents[1]
TOPS = ("placement", "proto", "mtp", "shard", "node", "dashboard")

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def product_files(root: Path = ROOT) -> Iterator[Path]:
    """The product's Python files, without generated code and models."""
    for top in TOPS:
        for path in sorted((root / top).rglob("*.py")):
            if "_pb2" not in path.name and "models" not in path.relative_to(root).parts:
                yield path.relative_to(root)


def lines_by_room() -> dict[str, int]:
    """Lines of each folder that has modules."""
    counts = dict[str, int]()
    for path in product_files():
        room = path.parent.as_posix()
        counts[room] = counts.get(room, 0) + len((ROOT / path).read_text().splitlines())
    return counts


@dataclass(eq=False)
class Module:
    """A file: its definitions, and what its names stand for."""

    root: Path
    path: Path

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse((self.root / self.path).read_text())

    @cached_property
    def definitions(self) -> dict[str, Definition]:
        """Functions and classes of the module, by name."""
        return {n.name: n for n in self.tree.body if isinstance(n, Definition)}

    @cached_property
    def imports(self) -> dict[str, tuple[Path, str]]:
        """The file and the name that each imported name stands for; an empty name is the module."""
        names = dict[str, tuple[Path, str]]()
        for node in ast.walk(self.tree):
            if not isinstance(node, ast.ImportFrom) or not node.level:
                continue
            folder = self.path.parents[node.level - 1]
            folder = folder.joinpath(*(node.module or "").split(".")) if node.module else folder
            for alias in node.names:
                name = alias.asname or alias.name
                if (self.root / folder / f"{alias.name}.py").exists():
                    names[name] = (folder / f"{alias.name}.py", "")
                else:
                    names[name] = (folder.with_suffix(".py"), alias.name)
        return names


@dataclass(eq=False)
class RequestPath:
    """What is reached from some functions, named `FILE:NAME` or `FILE:CLASS.METHOD`."""

    entries: Iterable[str]
    root: Path = ROOT
    _modules: dict[Path, Module] = field(default_factory=dict[Path, Module])
    _pending: list[tuple[Module, ast.AST]] = field(default_factory=list[tuple[Module, ast.AST]])
    _classes: dict[ast.ClassDef, Module] = field(default_factory=dict[ast.ClassDef, Module])
    _attributes: dict[str, set[Path]] = field(default_factory=dict[str, set[Path]])
    """The modules in whose reached code each attribute occurs."""
    _importers: defaultdict[tuple[Path, str], set[Path]] = field(
        default_factory=lambda: defaultdict(set)
    )
    """The modules that each class is named in, by its file and name."""
    _seen: set[int] = field(default_factory=set[int])
    _lines: dict[Path, set[int]] = field(default_factory=dict[Path, set[int]])

    def count(self) -> tuple[int, int]:
        """Files that are reached, and the lines of what is reached in them."""
        for path in product_files(self.root):
            self._modules[path] = Module(self.root, path)
        for path, module in self._modules.items():
            for name in module.definitions:
                self._importers[path, name].add(path)
            for target in module.imports.values():
                self._importers[target].add(path)
        for entry in self.entries:
            file, _, name = entry.partition(":")
            module, (first, *rest) = self._modules[Path(file)], name.split(".")
            definition = module.definitions[first]
            self._reach(module, definition)
            for each in rest:
                assert isinstance(definition, ast.ClassDef)
                definition = _methods(definition)[each]
                self._reach(module, definition)
        while self._pending:
            self._follow(*self._pending.pop())
        return len(self._lines), sum(map(len, self._lines.values()))

    def _reach(self, module: Module, node: ast.AST) -> None:
        if id(node) in self._seen:
            return
        self._seen.add(id(node))
        if isinstance(node, ast.ClassDef):
            self._reach_class(module, node)
        else:
            self._pending.append((module, node))

    def _reach_class(self, module: Module, node: ast.ClassDef) -> None:
        self._classes[node] = module
        methods, importers = _methods(node), self._importers[module.path, node.name]
        for statement in (*node.bases, *node.decorator_list, *node.body):
            if not isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
                self._pending.append((module, statement))
        for name, method in methods.items():
            if name.startswith("__") or not importers.isdisjoint(self._attributes.get(name, ())):
                self._reach(module, method)
        if any(isinstance(base, ast.Name) and base.id == "Protocol" for base in node.bases):
            self._reach_implementations(module, node)

    def _reach_implementations(self, owner: Module, protocol: ast.ClassDef) -> None:
        """Reaches the classes with a protocol's methods; who names it calls theirs."""
        names = set(_methods(protocol))
        for module in self._modules.values():
            for other in module.definitions.values():
                is_class = isinstance(other, ast.ClassDef) and other is not protocol
                if names and is_class and names <= set(_methods(other)):
                    importers = self._importers[owner.path, protocol.name]
                    self._importers[module.path, other.name] |= importers
                    self._reach(module, other)

    def _follow(self, module: Module, node: ast.AST) -> None:
        """Reaches what a piece of code names."""
        assert isinstance(node, ast.expr | ast.stmt)
        outer = (node, *getattr(node, "decorator_list", ()))
        first, last = min(each.lineno for each in outer), node.end_lineno or node.lineno
        self._lines.setdefault(module.path, set()).update(range(first, last + 1))
        for each in ast.walk(node):
            if isinstance(each, ast.Name):
                self._resolve(module, each.id)
            elif isinstance(each, ast.Attribute):
                self._reach_attribute(module, each)

    def _reach_attribute(self, module: Module, node: ast.Attribute) -> None:
        if isinstance(node.value, ast.Name) and node.value.id in module.imports:
            path, name = module.imports[node.value.id]
            if not name and path in self._modules:
                self._resolve(self._modules[path], node.attr)
                return
        modules = self._attributes.setdefault(node.attr, set())
        if module.path in modules:
            return
        modules.add(module.path)
        for definition, owner in list(self._classes.items()):
            method = _methods(definition).get(node.attr)
            if method and module.path in self._importers[owner.path, definition.name]:
                self._reach(owner, method)

    def _resolve(self, module: Module, name: str) -> None:
        if name in module.definitions:
            self._reach(module, module.definitions[name])
        elif name in module.imports:
            path, target = module.imports[name]
            if target and path in self._modules and path != module.path:
                self._resolve(self._modules[path], target)


@cache
def _methods(node: ast.AST) -> dict[str, ast.FunctionDef | ast.AsyncFunctionDef]:
    assert isinstance(node, ast.ClassDef)
    functions = (n for n in node.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))
    return {n.name: n for n in functions}


def fields_of(form: str) -> int:
    """Annotated fields of a class `FILE:CLASS`, those of its bases in the product included."""
    return len(_field_names(form))


def _field_names(form: str) -> set[str]:
    file, _, name = form.partition(":")
    module = Module(ROOT, Path(file))
    definition = module.definitions[name]
    assert isinstance(definition, ast.ClassDef)
    own = {ast.unparse(n.target) for n in definition.body if isinstance(n, ast.AnnAssign)}
    for base in definition.bases:
        if isinstance(base, ast.Name) and base.id in module.definitions:
            own |= _field_names(f"{file}:{base.id}")
        elif isinstance(base, ast.Name) and base.id in module.imports:
            path, target = module.imports[base.id]
            own |= _field_names(f"{path}:{target}")
    return own
