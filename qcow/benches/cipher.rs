//! The speed of the guest data's ciphers on one processor: pieces of 128 KiB, as the engine has them, and single sectors.
//!
//! Besides criterion's report it prints `bench_result NAME VALUE UNIT` lines for `make bench`. A figure that is taken beside
//! other work is a lower bound.

#![expect(clippy::print_stdout, reason = "the figures are read by `make bench`")]

use std::hint::black_box;
use std::time::{Duration, Instant};

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use qcow::luks::{CipherKind, LuksOptions, Secret, SectorCipher, create};

const PIECE: usize = 128 << 10;
const SECTOR: usize = 512;
/// The time that one measurement takes at least, and the number of measurements, of which the fastest counts: what else runs
/// makes them slow, never fast.
const MEASURED: Duration = Duration::from_millis(50);
const ROUNDS: usize = 10;

fn cipher(kind: CipherKind) -> SectorCipher {
    let options = LuksOptions {
        cipher: kind,
        iter_time: Duration::from_millis(1),
        ..LuksOptions::default()
    };
    let made = create(&Secret::new(b"a passphrase".to_vec()), &options);
    made.expect("random bytes").1
}

/// Returns the bytes that `work`, which handles `len`, handles in a second.
fn rate(len: usize, mut work: impl FnMut()) -> f64 {
    let mut fastest = 0.0_f64;
    for _ in 0..ROUNDS {
        let start = Instant::now();
        let mut calls = 0_usize;
        while start.elapsed() < MEASURED {
            for _ in 0..16 {
                work();
            }
            calls += 16;
        }
        fastest = fastest.max((calls * len) as f64 / start.elapsed().as_secs_f64());
    }
    fastest
}

fn ciphers(criterion: &mut Criterion) {
    for kind in [CipherKind::Aes256Xts, CipherKind::Aes128Xts] {
        let cipher = cipher(kind);
        for (size, len) in [("piece", PIECE), ("sector", SECTOR)] {
            let mut bytes = vec![7; len];
            let mut group = criterion.benchmark_group(format!("{}/{size}", kind.name()));
            group.throughput(Throughput::Bytes(len as u64));
            group.bench_function("encrypt", |bencher| {
                bencher.iter(|| cipher.encrypt(black_box(9), black_box(&mut bytes)));
            });
            group.bench_function("decrypt", |bencher| {
                bencher.iter(|| cipher.decrypt(black_box(9), black_box(&mut bytes)));
            });
            group.finish();
            for (name, rate) in [
                (
                    "encrypt",
                    rate(len, || cipher.encrypt(black_box(9), black_box(&mut bytes))),
                ),
                (
                    "decrypt",
                    rate(len, || cipher.decrypt(black_box(9), black_box(&mut bytes))),
                ),
            ] {
                println!(
                    "bench_result cipher/{}-{name}-{size} {:.3} GB/s",
                    kind.name(),
                    rate / 1e9
                );
            }
        }
    }
}

criterion_group!(benches, ciphers);
criterion_main!(benches);
