//! Fills `corpus/` with inputs to start from: `cargo run --example seeds` in this folder. What a fuzzer found before
//! stays.

use std::io;
use std::path::Path;

fn main() -> io::Result<()> {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus");
    for body in bodies::BODIES {
        let folder = corpus.join(body.name);
        std::fs::create_dir_all(&folder)?;
        for (name, bytes) in (body.seeds)() {
            std::fs::write(folder.join(name), bytes)?;
        }
    }
    Ok(())
}
