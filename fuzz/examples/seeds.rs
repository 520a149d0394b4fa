//! Fills `corpus/` with small sound inputs: `cargo run --example seeds` in this folder.

use std::io;
use std::path::Path;

use ringdisk_fuzz::seeds;

fn main() -> io::Result<()> {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus");
    for (target, seeds) in [
        ("header", seeds::images()),
        ("check", seeds::images()),
        ("l2_entry", seeds::entries()),
    ] {
        let folder = corpus.join(target);
        std::fs::create_dir_all(&folder)?;
        for (name, bytes) in seeds {
            std::fs::write(folder.join(name), bytes)?;
        }
    }
    Ok(())
}
