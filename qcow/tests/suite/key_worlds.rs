//! Secrets that are added to an image and removed from it in the simulated world; and the power may go at any step.
//!
//! After each cut, every secret that was to stay opens the image with the same key, one whose change was under way
//! may or may not, one that was removed does not, and the image has no flaw.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;

use block::Context;
use block::file::FileView;
use qcow::image::{CreateOptions, Verdict, add_key, check, create, read_header, remove_key};
use qcow::luks::{self, CipherKind, HashKind, LuksError, LuksOptions, Removal, SECTOR, Secret, SectorCipher};
use simulator::{Profile, Random, SimWorld};

use crate::steps::run_to_end;

const DISK: &str = "disk";
const FAST: Duration = Duration::from_millis(1);

fn secret(number: u64) -> Secret {
    Secret::new(format!("secret {number}").into_bytes())
}

/// The state of a secret's slot, as far as it is known.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum State {
    Opens,
    MayOpen,
    IsGone,
}

fn sample(cipher: &SectorCipher) -> Vec<u8> {
    let mut bytes = vec![1; SECTOR];
    cipher.encrypt(3, &mut bytes);
    bytes
}

/// Judges what a cut leaves: the bytes of an image.
struct Judge {
    world: SimWorld,
    cx: Context,
    /// Some bytes, encrypted with the volume's key.
    sample: Vec<u8>,
}

impl Judge {
    fn look(&self, bench: &SimWorld, states: &BTreeMap<u64, State>, what: &str, random: &mut Random) {
        let cut = bench.crash_space(DISK).draw(random);
        let image = cut.to_bytes();
        self.world.set_contents(DISK, cut);
        let view = self.world.file(DISK, false).view(&self.cx).expect("a view");
        let looked = self.cx.block_on(async {
            let report = check(&view).await.expect("a check");
            assert_eq!(report.verdict(), Verdict::Clean, "{what}: {:?}", report.findings);
            read_header(&view).await.expect("a header")
        });
        let (offset, len) = looked.expect("it turns").header.crypto_header().expect("a place");
        let luks = &image[offset.bytes() as usize..][..len as usize];
        let mut opened = 0;
        for (&number, &state) in states {
            match luks::unlock(luks, &secret(number)) {
                Ok(cipher) => {
                    opened += 1;
                    assert_ne!(state, State::IsGone, "{what}: removed secret {number} opens");
                    assert!(
                        sample(&cipher) == self.sample,
                        "{what}: secret {number} opens to another key"
                    );
                }
                Err(LuksError::WrongSecret) => {
                    assert_ne!(state, State::Opens, "{what}: secret {number} opens no more");
                }
                Err(error) => panic!("{what}: {error}"),
            }
        }
        // A slot in use that opens for nobody would count as the other one when the last good one is removed.
        let slots = luks::describe(luks).expect("a sound header").slots;
        let used = slots.iter().filter(|slot| slot.active).count();
        assert_eq!(
            used, opened,
            "{what}: slots in use, and secrets that open the image"
        );
    }
}

fn run(seed: u64) {
    let random = &mut Random::new(seed);
    let world = SimWorld::new(seed, Profile::IMMEDIATE);
    let cx = world.context(64);
    let options = LuksOptions {
        cipher: random.pick(&[CipherKind::Aes128Xts, CipherKind::Aes256Xts]),
        hash: HashKind::Sha256,
        iter_time: FAST,
    };
    let (header, cipher) = luks::create(&secret(0), &options).expect("a header");
    let options = CreateOptions {
        cluster_size: random.pick(&[512, 4096, 65536]),
        luks_header: Some(header),
        ..CreateOptions::new(1 << 20)
    };
    let created = cx.block_on(async {
        let view = world.file(DISK, true).view(&cx).expect("a view");
        create(&view, &options).await
    });
    created.expect("it turns").expect("an image");
    world.settle();
    world.set_profile(Profile::draw(random));
    let judge = {
        let world = SimWorld::with_store(0, Profile::IMMEDIATE, &world.store());
        Judge {
            cx: world.context(64),
            world,
            sample: sample(&cipher),
        }
    };
    let states = Rc::new(RefCell::new(BTreeMap::from([(0, State::Opens)])));
    for round in 1..5 {
        let opening: Vec<u64> = {
            let states = states.borrow();
            let opening = states.iter().filter(|&(_, &state)| state == State::Opens);
            opening.map(|(&number, _)| number).collect()
        };
        let known = random.pick(&opening);
        let is_removal = opening.len() > 1 && random.one_in(2);
        let subject = if is_removal { known } else { round };
        states.borrow_mut().insert(subject, State::MayOpen);
        let slot = random.pick(&[None, Some(6), Some(7)]);
        let (view, in_task) = (
            world.file(DISK, true).view(&cx).expect("a view"),
            Rc::clone(&states),
        );
        let task = async move {
            let state = if is_removal {
                remove(&view, known).await;
                State::IsGone
            } else {
                add(&view, known, round, slot).await
            };
            in_task.borrow_mut().insert(subject, state);
        };
        let what = format!("seed {seed}, round {round}");
        let mut cuts = 0;
        run_to_end(&world, &cx, &what, task, || {
            // Each look opens slots, which takes some milliseconds.
            if cuts < 12 && random.one_in(2) {
                cuts += 1;
                judge.look(&world, &states.borrow(), &what, random);
            }
        });
        judge.look(&world, &states.borrow(), &what, random);
    }
}

async fn remove(view: &FileView, number: u64) {
    let secret = secret(number);
    let removed = remove_key(view, &Removal::Of(&secret)).await;
    removed.expect("a removal");
}

async fn add(view: &FileView, known: u64, new: u64, slot: Option<usize>) -> State {
    match add_key(view, &secret(known), &secret(new), slot, FAST).await {
        Ok(_) => State::Opens,
        Err(qcow::image::KeysError::Luks(LuksError::SlotInUse { .. })) => State::IsGone,
        Err(error) => panic!("{error}"),
    }
}

#[test]
fn secrets_that_stay_open_the_image_after_a_cut_at_any_step() {
    for seed in 0..12 {
        run(seed);
    }
}

/// The simulated disk tears a slot that crosses a sector, as slot 6 does; this is the place where it would show.
#[test]
fn slot_6_crosses_a_sector() {
    let fast = LuksOptions {
        iter_time: FAST,
        ..LuksOptions::default()
    };
    let (header, _) = luks::create(&secret(0), &fast).expect("a header");
    let change = luks::add_key(&header, &secret(0), &secret(1), Some(6), FAST).expect("a change");
    let fields = change.steps[0]
        .iter()
        .find(|write| write.bytes.len() == 48)
        .expect("the slot");
    assert!(fields.at < SECTOR && fields.at + 48 > SECTOR);
    let [state] = &change.steps[1][..] else {
        panic!("{:?}", change.steps[1])
    };
    assert!(
        state.at / SECTOR == (state.at + state.bytes.len() - 1) / SECTOR,
        "the state is in one sector"
    );
}
