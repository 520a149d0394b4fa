//! A server that hands its device over: it takes the steps of production until its process ends. Its answers and the
//! image that it leaves are checked.
//!
//! The driver is told to bring no new requests. One that cannot be told brings them to the last. The server's process
//! may be killed at any step; then it has to meet no more than any server that is killed.
//!
//! Invariants: once the disk is closed nothing of the old server changes the image; no request fails for the change of
//! servers; and the image that it leaves has no leaks, if the disk had no faults.

use std::rc::Rc;

use block::canary::{Rule, broken};
use block::{Disk, IoError};
use virtio_devices::ublk::abi::Flags;
use virtio_devices::ublk::{Duty, HandOverProgress, Recovery, Step, parting_duty};

use crate::judge::Demand;
use crate::plan::Quiesce;
use crate::run::{Run, Slot};
use crate::shape::DISK;
use crate::ublk::Command;

impl Run<'_> {
    /// The server is asked to leave. It refuses where that would fail requests.
    pub(crate) fn hand_over(&mut self) -> Result<(), String> {
        let Some(host) = &mut self.host else {
            return Ok(());
        };
        let mut flags = host.ublk.recovery.flags();
        flags.set(Flags::QUIESCE, host.ublk.quiesce != Quiesce::Lacking);
        if Recovery::obstacle(flags).is_some() {
            self.record.borrow_mut().reached.refused += 1;
            return Ok(());
        }
        for queue in &host.queues {
            match host.ublk.quiesce {
                Quiesce::Lacking => {}
                Quiesce::EndsTags => queue.model().quiesce(),
                Quiesce::HoldsBack => queue.model().hold_back(),
            }
        }
        // What the host asks comes all the time, or when the disk is closed.
        host.is_idle = self.schedule.one_in(2);
        self.record.borrow_mut().reached.handovers += 1;
        self.set_duty(parting_duty(flags))?;
        let settled = self.settle()?;
        if let Some(host) = &mut self.host {
            host.is_idle = false;
        }
        let changes = self.world.changes();
        if settled {
            self.look_at_what_is_left()?;
            self.wait_for_the_end()?;
        }
        self.look_at_errors()?;
        let lost = self.end_process()?;
        if settled && self.world.changes() != changes {
            return Err("a server changed the image that it had closed for the next one".to_owned());
        }
        if settled {
            let mut record = self.record.borrow_mut();
            record.reached.kept += lost;
            if Recovery::of(flags) != Recovery::Reissue && lost > 0 {
                return Err(format!("{lost} requests fail because servers change"));
            }
        } else if let Some(host) = &mut self.host {
            host.may_leak = true;
        }
        self.next_server()
    }

    /// Gives all queues a duty, each between two rounds of its worker.
    fn set_duty(&mut self, duty: Duty) -> Result<(), String> {
        let queues = self.host.as_ref().map_or(0, |host| host.queues.len());
        for queue in 0..queues {
            let worker = self.worker_of(queue);
            self.command(worker, Command::Duty { queue, duty })?;
        }
        Ok(())
    }

    /// Finishes what there is to finish, and closes the disk. `false` if the process is killed meanwhile, or cannot
    /// close it.
    fn settle(&mut self) -> Result<bool, String> {
        let disk = self.disk.clone().ok_or("no disk")?;
        let _held = disk.hold_off();
        let mut progress = HandOverProgress::default();
        loop {
            if self.schedule.one_in(64) {
                return Ok(false);
            }
            for worker in 0..self.workers.len() {
                self.command(worker, Command::Nothing)?;
            }
            let mut all = self.host.iter().flat_map(|host| &host.served);
            let finished = all.all(|served| served.state.unfinished() == Some(0));
            match progress.after_round(finished || broken(Rule::UblkLeavesEarly)) {
                Step::Wait => {}
                Step::Keep => self.set_duty(Duty::Keep)?,
                Step::Close => break,
            }
        }
        let slot: Slot<Result<(), IoError>> = Rc::default();
        let (cx, place) = (self.workers[0].context().clone(), Rc::clone(&slot));
        let task_cx = cx.clone();
        cx.spawn(async move {
            let closed = disk.close(&task_cx).await;
            *place.borrow_mut() = Some(closed);
        });
        Ok(self.wait_for(&slot)?.is_ok())
    }

    /// The process goes on for a while, and so does the host, but the disk is closed.
    fn wait_for_the_end(&mut self) -> Result<(), String> {
        let until = self.turns() + self.schedule.below(120);
        self.drive(|run| run.turns() >= until || run.world.in_flight() > 0)?;
        match self.world.in_flight() {
            0 => Ok(()),
            _ => Err("a server that has closed its disk does I/O".to_owned()),
        }
    }

    /// Fails unless the image is as a clean shutdown leaves it.
    fn look_at_what_is_left(&mut self) -> Result<(), String> {
        if self.world.in_flight() > 0 {
            return Err("a server has closed its disk with I/O in flight".to_owned());
        }
        let may_leak = self.host.as_ref().is_some_and(|host| host.may_leak);
        let demand = if may_leak || self.case.profile.has_errors() {
            Demand::Sound
        } else {
            Demand::Flawless
        };
        let image = self.world.contents(DISK);
        self.judge_now(&image, demand)
    }

    /// Fails if a server that leaves has answered an error to a request that the next one could have tried again.
    fn look_at_errors(&self) -> Result<(), String> {
        let Some(host) = &self.host else {
            return Ok(());
        };
        let failed = host.served.iter().position(|served| {
            let before = served.errors.unwrap_or(u64::MAX);
            served.state.counts().errors > before
        });
        match failed {
            Some(queue) if host.ublk.recovery == Recovery::Reissue => Err(format!(
                "queue {queue}: a server that leaves has answered with an error"
            )),
            _ => Ok(()),
        }
    }
}
