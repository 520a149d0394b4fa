//! The modules at the top of a crate depend in one direction: what lies below can be read, tested and changed without what lies above.
//!
//! Followed are `use` declarations and paths that begin with `crate`, `super` or `self`, outside of tests and of macros' arguments.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use syn::visit::{self, Visit};
use syn::{Attribute, Item, ItemUse, UseTree};

/// The imports between the modules at the top of a crate.
#[derive(Default)]
struct Imports {
    modules: BTreeSet<String>,
    /// The names that `lib.rs` exports again, with the module of each.
    exported: BTreeMap<String, String>,
    /// For each pair of modules, a file of the first that names the second.
    edges: BTreeMap<String, BTreeMap<String, PathBuf>>,
}

impl Imports {
    /// Reads the crate whose sources are in `folder`.
    fn read(folder: &Path) -> Self {
        let root = parse(&folder.join("lib.rs"));
        let mut imports = Self::default();
        for item in &root.items {
            if let Item::Mod(module) = item {
                imports.modules.insert(module.ident.to_string());
            }
        }
        for item in &root.items {
            let Item::Use(item) = item else { continue };
            for path in paths_of(&item.tree) {
                let is_module = path.first().is_some_and(|first| imports.modules.contains(first));
                if let (Some(first), Some(last), true) = (path.first(), path.last(), is_module) {
                    imports.exported.insert(last.clone(), first.clone());
                }
            }
        }
        imports.follow(&root.items, &folder.join("lib.rs"), folder, &[]);
        imports
    }

    /// Follows the items of a module in `file`, whose own modules are in `folder`.
    fn follow(&mut self, items: &[Item], file: &Path, folder: &Path, module: &[String]) {
        for item in items {
            let Item::Mod(inner) = item else {
                let mut names = Names {
                    imports: self,
                    file,
                    module,
                };
                names.visit_item(item);
                continue;
            };
            if is_test(&inner.attrs) {
                continue;
            }
            let name = inner.ident.to_string();
            let path = [module, std::slice::from_ref(&name)].concat();
            let below = folder.join(&name);
            match &inner.content {
                Some((_, items)) => self.follow(items, file, &below, &path),
                None => {
                    let candidates = [folder.join(format!("{name}.rs")), below.join("mod.rs")];
                    let file = candidates.iter().find(|file| file.exists());
                    let file = file.unwrap_or_else(|| panic!("{path:?} is in none of {candidates:?}"));
                    self.follow(&parse(file).items, file, &below, &path);
                }
            }
        }
    }

    /// Adds a path that a file of `module` names.
    fn add(&mut self, path: &[String], file: &Path, module: &[String]) {
        let Some(own) = module.first() else { return };
        let mut base = module;
        let mut path = path;
        match path {
            [first, rest @ ..] if first == "crate" => (base, path) = (&[], rest),
            [first, rest @ ..] if first == "self" => path = rest,
            [first, ..] if first == "super" => {}
            _ => return,
        }
        while let [first, rest @ ..] = path
            && first == "super"
        {
            base = base.split_last().map_or(&[], |(_, above)| above);
            path = rest;
        }
        let Some(first) = base.first().or(path.first()) else {
            return;
        };
        let target = match self.modules.contains(first) {
            true => first,
            false => match self.exported.get(first) {
                Some(module) => module,
                None => return,
            },
        };
        if target != own {
            let edges = self.edges.entry(own.clone()).or_default();
            edges.entry(target.clone()).or_insert_with(|| file.to_owned());
        }
    }

    /// Returns a shortest circle of modules, each with a file of it that names the next.
    fn circle(&self) -> Option<Vec<(&str, &Path)>> {
        let circles = self.edges.keys().filter_map(|module| self.circle_of(module));
        circles.min_by_key(Vec::len)
    }

    /// Returns a shortest circle that leads through a module.
    fn circle_of(&self, module: &str) -> Option<Vec<(&str, &Path)>> {
        let mut ways = vec![(module, Vec::new())];
        let mut seen = BTreeSet::new();
        while !ways.is_empty() {
            let mut longer = Vec::new();
            for (at, way) in ways {
                let Some((at, edges)) = self.edges.get_key_value(at) else {
                    continue;
                };
                for (next, file) in edges {
                    let way = [&way[..], &[(at.as_str(), file.as_path())]].concat();
                    if next == module {
                        return Some(way);
                    }
                    if seen.insert(next) {
                        longer.push((next.as_str(), way));
                    }
                }
            }
            ways = longer;
        }
        None
    }
}

/// Collects the paths that a file of a module names.
struct Names<'a> {
    imports: &'a mut Imports,
    file: &'a Path,
    module: &'a [String],
}

impl Visit<'_> for Names<'_> {
    fn visit_item(&mut self, item: &Item) {
        let attributes: &[Attribute] = match item {
            Item::Const(item) => &item.attrs,
            Item::Fn(item) => &item.attrs,
            Item::Impl(item) => &item.attrs,
            Item::Mod(item) => &item.attrs,
            Item::Static(item) => &item.attrs,
            Item::Struct(item) => &item.attrs,
            Item::Use(item) => &item.attrs,
            _ => &[],
        };
        if !is_test(attributes) {
            visit::visit_item(self, item);
        }
    }

    fn visit_item_use(&mut self, item: &ItemUse) {
        for path in paths_of(&item.tree) {
            self.imports.add(&path, self.file, self.module);
        }
    }

    fn visit_path(&mut self, path: &syn::Path) {
        let names: Vec<String> = path.segments.iter().map(|part| part.ident.to_string()).collect();
        self.imports.add(&names, self.file, self.module);
        visit::visit_path(self, path);
    }
}

/// Returns each path of a tree of imports; of a renamed one the name that it has where it is from.
fn paths_of(tree: &UseTree) -> Vec<Vec<String>> {
    let below = |name: String, tree| {
        let mut paths = paths_of(tree);
        paths.iter_mut().for_each(|path| path.insert(0, name.clone()));
        paths
    };
    match tree {
        UseTree::Path(path) => below(path.ident.to_string(), &path.tree),
        UseTree::Name(name) => vec![vec![name.ident.to_string()]],
        UseTree::Rename(rename) => vec![vec![rename.ident.to_string()]],
        UseTree::Glob(_) => vec![Vec::new()],
        UseTree::Group(group) => group.items.iter().flat_map(paths_of).collect(),
    }
}

/// Returns true for what is compiled only into tests and models.
fn is_test(attributes: &[Attribute]) -> bool {
    let conditions = attributes
        .iter()
        .filter(|attribute| attribute.path().is_ident("cfg"));
    conditions
        .filter_map(|attribute| attribute.meta.require_list().ok())
        .map(|list| list.tokens.to_string())
        .any(|condition| {
            let mut words = condition.split(|letter: char| !letter.is_alphanumeric());
            words.all(|word| word != "not")
                && ["test", "loom", "shuttle"]
                    .iter()
                    .any(|word| condition.contains(word))
        })
}

fn parse(file: &Path) -> syn::File {
    let text = std::fs::read_to_string(file).unwrap_or_else(|error| panic!("{}: {error}", file.display()));
    syn::parse_file(&text).unwrap_or_else(|error| panic!("{}: {error}", file.display()))
}

#[test]
fn modules_of_a_crate_depend_in_one_direction() {
    for name in ["block", "qcow", "virtio-devices", "vmm", "sim"] {
        let imports = Imports::read(&crate::root().join(name).join("src"));
        assert!(imports.edges.len() > 2, "{name}: {:?}", imports.edges);
        let circle = imports.circle();
        assert!(
            circle.is_none(),
            "{name}: each file imports the next module, and the last the first: {circle:#?}"
        );
    }
}

#[test]
fn circle_of_modules_is_found() {
    let folder = tempfile::tempdir().expect("a folder");
    let write = |name: &str, text: &str| std::fs::write(folder.path().join(name), text).expect("a file");
    std::fs::create_dir(folder.path().join("c")).expect("a folder");
    write(
        "lib.rs",
        "mod a; mod b; mod c; pub use c::{Deep as Renamed, inner::Other};",
    );
    write(
        "a.rs",
        "use crate::b::X; #[cfg(test)] mod tests { use crate::c; }",
    );
    write("b.rs", "#[cfg(test)] use crate::a::X; fn f() { crate::c::g() }");
    write("c.rs", "mod inner;");
    write("c/inner.rs", "use super::super::c;");
    let read = || Imports::read(folder.path());
    assert_eq!(read().circle(), None, "b's import is a test's");
    write(
        "c/inner.rs",
        "use std::{fmt, fs}; use super::super::{a::Y as Z, c};",
    );
    let imports = read();
    let circle = imports.circle().expect("a, b, c, a");
    let modules: Vec<_> = circle.iter().map(|(module, _)| *module).collect();
    assert_eq!(modules, ["a", "b", "c"]);
    assert!(
        circle.iter().any(|(_, file)| file.ends_with("c/inner.rs")),
        "{circle:?}"
    );
    write("c/inner.rs", "");
    write("b.rs", "fn f(_: crate::Other) {}");
    write("c.rs", "mod inner; impl crate::b::T for () {}");
    assert_eq!(
        read().circle().map(|circle| circle.len()),
        Some(2),
        "b names c's by the crate's root"
    );
}
