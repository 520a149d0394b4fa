//! Random orders of workers that look up and build the spans of one index, which has room for some of them.

use super::index::{ChainIndex, INDEX_BYTES_MAX};
use super::places::{PlaceRuns, Places};
use super::span::{Run, Span};
use crate::sync::thread;
use std::sync::Arc;

const SPANS: u64 = 6;

/// The layer that decides the first or the second half of a span.
fn layer(span: u64, half: u64) -> u8 {
    (1 + 2 * span + half) as u8
}

/// The places of a span: of its first half only.
fn places(bytes: u64, span: u64) -> Option<Places> {
    let mut runs = PlaceRuns::default();
    runs.push(0, Some((1 + span) * bytes));
    runs.push(bytes / 2, None);
    runs.encode(bytes)
}

/// One worker: a look at each span, which it builds if nobody else does. Returns the number it has built.
fn work(index: &Arc<ChainIndex>, spans: impl Iterator<Item = u64>) -> usize {
    let bytes = index.span_bytes();
    let reader = index.reader();
    let mut built = 0;
    for span in spans {
        for half in [0, 1] {
            let found = reader.find(span * bytes + half * bytes / 2, 512);
            assert_eq!(found.len, 512);
            let place = (found.layer > 0 && half == 0).then_some((1 + span) * bytes);
            assert_eq!(found.place, place, "with the layer comes the place");
            match found.missing {
                Some(missing) => assert_eq!((missing, found.layer), (span, 0)),
                // Another may hold the lock: then nothing is known, and nothing is missing.
                None => assert!(found.layer == layer(span, half) || found.layer == 0),
            }
            let Some(building) = found.missing.and_then(|span| index.begin(span)) else {
                continue;
            };
            // A queue that is closed gives up.
            if span == SPANS {
                continue;
            }
            built += 1;
            let runs = [0, 1].map(|half| Run {
                start: half * bytes / 2,
                layer: layer(span, half),
            });
            building.end(
                Span::encode(&runs, bytes).unwrap_or(Span::Whole(0)),
                places(bytes, span),
            );
        }
    }
    built
}

/// Fails if a lookup finds what nobody entered, if a span is built twice while there is room, or if one that was begun and
/// given up can never be built.
#[test]
fn workers_build_each_span_once() {
    let run = || {
        let index = ChainIndex::new(1 << 30, 4096, INDEX_BYTES_MAX);
        let other = Arc::clone(&index);
        let thread = thread::spawn(move || work(&other, (0..=SPANS).rev()));
        let mine = work(&index, 0..=SPANS);
        let theirs = thread.join().unwrap();
        // A span that both found locked is left for the next who looks.
        let rest = work(&index, 0..=SPANS);
        assert_eq!(mine + theirs + rest, SPANS as usize);
        assert!(
            (0..SPANS).all(|span| index.begin(span).is_none()),
            "each is there"
        );
        assert!(index.begin(SPANS).is_some(), "nobody builds it any more");
    };
    shuttle::check_random(run, 2000);
    shuttle::check_pct(run, 2000, 3);
}
